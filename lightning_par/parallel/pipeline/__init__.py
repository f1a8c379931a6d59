"""Pipeline parallelism by replay: every stage runs the user's own step on each micro-batch, with only its blocks real.

`probe` proves with one run that a step is a chain of blocks; `split` cuts the chain into stages; `absent` frees what
other stages own; `replay` runs a step as one stage; `runtime` runs the stages of a rank under one of torch's
`schedules`; `microbatches` and `loss_weights` make what the last stage returns into that of one step on the batch.
"""
