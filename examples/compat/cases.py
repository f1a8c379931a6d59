"""What is trained: the rows of the table in `README.md`."""

from __future__ import annotations

from examples.compat import modules as m
from examples.compat import scripts
from examples.compat.harness import Case

CASES = {
    case.name: case
    for case in (
        Case(
            "monai-unet",
            "monai",
            "`UNet` with residual units, `DiceCELoss`",
            "vision (segmentation)",
            m.monai_unet,
            lambda: m.pairs(m.images(), m.integers(3, 1, 16, 16)),
        ),
        Case(
            "vit",
            "transformers",
            "`ViTForImageClassification`",
            "vision",
            m.vit,
            lambda: m.pairs(m.numbers(3, 16, 16), m.integers(5)),
        ),
        Case(
            "tft",
            "pytorch-forecasting",
            "`TemporalFusionTransformer`",
            "forecasting, LightningModule",
            m.tft,
            m.series_with_covariates,
            m.series_loader,
        ),
        Case(
            "nbeats",
            "pytorch-forecasting",
            "`NBeats`",
            "forecasting, LightningModule",
            m.nbeats,
            m.series,
            m.series_loader,
        ),
        Case(
            "deepar",
            "gluonts",
            "`DeepARLightningModule` (ReduceLROnPlateau)",
            "forecasting, LightningModule",
            m.deepar,
            m.deepar_samples,
        ),
        Case(
            "gat", "torch_geometric", "`GAT` (v2), `GraphNorm`, `DataLoader`", "graphs", m.gat, m.graphs, m.graph_loader
        ),
        Case(
            "whisper",
            "transformers",
            "`WhisperForConditionalGeneration`",
            "speech",
            m.whisper,
            lambda: m.pairs(m.numbers(8, 32), 3 + m.integers(m.VOCABULARY - 3, 9)),
        ),
        Case(
            "conformer",
            "conformer",
            "`Conformer` (BatchNorm) with CTC loss",
            "speech",
            m.conformer,
            lambda: m.pairs(m.numbers(20, 8), 1 + m.integers(m.VOCABULARY - 1, 5)),
        ),
        Case(
            "gan",
            "monai",
            "`Generator` and `Discriminator`, manual optimisation",
            "GAN",
            m.GAN,
            lambda: m.pairs(m.images(), m.numbers(8, seed=9)),
        ),
        Case(
            "ddpm",
            "diffusers",
            "`UNet2DModel` with `DDPMScheduler`",
            "diffusion",
            m.ddpm,
            lambda: m.pairs(m.numbers(1, 8, 8), m.numbers(1, 8, 8, seed=9), m.integers(100)),
        ),
        Case(
            "lora",
            "peft",
            "LoRA and a saved head on `LlamaForCausalLM`",
            "language, fine-tuning",
            m.lora,
            lambda: m.pairs(m.integers(m.VOCABULARY, 12)),
        ),
        Case(
            "x-transformer",
            "x-transformers",
            "`AutoregressiveWrapper(TransformerWrapper)`",
            "language",
            m.x_transformer,
            lambda: m.pairs(m.integers(m.VOCABULARY, 12)),
        ),
        Case(
            "lightning-demo",
            "lightning",
            "`demos.LightningTransformer`",
            "LightningModule",
            m.lightning_demo,
            lambda: m.pairs(m.integers(m.VOCABULARY, 12), m.integers(m.VOCABULARY, 12, seed=9)),
        ),
        Case(
            "litgpt", "litgpt", "`pretrain.main`, its script, `empty_init` off", "Fabric trainer", train=scripts.litgpt
        ),
    )
}
