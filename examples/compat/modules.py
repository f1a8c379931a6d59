"""Modules of published packages, small, on random data that each sample's number fixes.

Packages are imported by the function that uses them, so that a case needs no other case's package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.compat.harness import SAMPLES, Manual

VOCABULARY = 61


class Fitted(pl.LightningModule):
    """A network of a package with a loss: what a user writes around a plain `nn.Module`."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With the default eps Adam amplifies the rounding of gradients that are truly zero.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


def numbers(*shape: int, seed: int = 7) -> Tensor:
    """Random numbers for all samples."""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 8) -> Tensor:
    return torch.randint(high, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def images() -> Tensor:
    return numbers(1, 16, 16)


def pairs(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns, strict=True))


# -- vision ------------------------------------------------------------------------------------------------------


def monai_unet() -> pl.LightningModule:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    loss = DiceCELoss(softmax=True, to_onehot_y=True)
    net = UNet(spatial_dims=2, in_channels=1, out_channels=3, channels=(4, 8, 16), strides=(2, 2), num_res_units=2)
    return Fitted(net, lambda model, batch: loss(model(batch[0]), batch[1]))


def vit() -> pl.LightningModule:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=5,
    )
    return Fitted(
        ViTForImageClassification(config), lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss
    )


# -- forecasting -------------------------------------------------------------------------------------------------


def series(**options: Any) -> Any:
    """A data set of pytorch-forecasting: windows of two series of random walks."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    walks = torch.randn(2, 20, generator=torch.Generator().manual_seed(7)).cumsum(1)
    rows = [
        {"time": t, "name": "ab"[i], "value": float(walks[i, t]), "hour": float(t % 5)}
        for i in range(2)
        for t in range(20)
    ]
    return TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["name"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **options,
    )


def series_with_covariates() -> Any:
    return series(static_categoricals=["name"], time_varying_known_reals=["hour"])


def series_loader(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, collate_fn=dataset._collate_fn, **options)


def tft() -> pl.LightningModule:
    from pytorch_forecasting import TemporalFusionTransformer

    return TemporalFusionTransformer.from_dataset(
        series_with_covariates(), hidden_size=8, attention_head_size=2, hidden_continuous_size=4, **FORECASTING
    )


def nbeats() -> pl.LightningModule:
    from pytorch_forecasting import NBeats

    return NBeats.from_dataset(series(), widths=[16, 16], backcast_loss_ratio=0.1, **FORECASTING)


# The default optimizer, Ranger, is of another package.
FORECASTING = {"optimizer": "adamw", "learning_rate": 1e-3, "log_interval": -1, "optimizer_params": {"eps": 1e-4}}


def deepar() -> pl.LightningModule:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    options = {
        "freq": "D",
        "context_length": 8,
        "prediction_length": 4,
        "num_feat_dynamic_real": 1,
        "num_feat_static_real": 1,
        "num_feat_static_cat": 1,
        "cardinality": [2],
        "hidden_size": 8,
        "lags_seq": [1, 2],
        "dropout_rate": 0.0,
    }
    return DeepARLightningModule(model_kwargs=options)


def deepar_samples() -> list[dict[str, Tensor]]:
    """Windows as the splitter of GluonTS makes them: 8 steps and 2 of lags, then 4 to forecast."""
    columns = {
        "feat_static_cat": integers(2, 1),
        "feat_static_real": numbers(1),
        "past_time_feat": numbers(10, 1, seed=9),
        "past_target": numbers(10, seed=10),
        "past_observed_values": torch.ones(SAMPLES, 10),
        "future_time_feat": numbers(4, 1, seed=11),
        "future_target": numbers(4, seed=12),
        "future_observed_values": torch.ones(SAMPLES, 4),
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(SAMPLES)]


# -- graphs ------------------------------------------------------------------------------------------------------


class GraphClassifier(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GAT

        super().__init__()
        self.gnn = GAT(in_channels=6, hidden_channels=16, num_layers=3, heads=2, norm="GraphNorm", v2=True)
        self.head = nn.Linear(16, 3)

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        return self.head(global_mean_pool(self.gnn(data.x, data.edge_index, batch=data.batch), data.batch))


def gat() -> pl.LightningModule:
    return Fitted(GraphClassifier(), lambda model, data: F.cross_entropy(model(data), data.y))


def graphs() -> list[Any]:
    """Graphs of 5 to 8 nodes, each node bound to two random ones."""
    from torch_geometric.data import Data

    made = []
    for i, label in enumerate(integers(3).tolist()):
        generator = torch.Generator().manual_seed(i)
        nodes = 5 + i % 4
        x = torch.randn(nodes, 6, generator=generator, dtype=torch.float64)
        edges = torch.stack([torch.arange(nodes).repeat(2), torch.randint(nodes, (2 * nodes,), generator=generator)])
        made.append(Data(x=x, edge_index=edges, y=torch.tensor([label])))
    return made


def graph_loader(dataset: Any, **options: Any) -> Any:
    from torch_geometric.loader import DataLoader as GraphLoader

    return GraphLoader(dataset, **options)


# -- speech ------------------------------------------------------------------------------------------------------


def whisper() -> pl.LightningModule:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Fitted(
        WhisperForConditionalGeneration(config),
        lambda model, batch: model(input_features=batch[0], labels=batch[1]).loss,
    )


class SpeechRecogniser(nn.Module):
    def __init__(self) -> None:
        from conformer import Conformer

        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.conformer = Conformer(dim=24, depth=2, dim_head=8, heads=2, conv_kernel_size=7)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conformer(self.inner(x)))


def conformer() -> pl.LightningModule:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        sounds, words = batch
        scores = model(sounds).log_softmax(-1).transpose(0, 1)
        times = torch.full((len(sounds),), sounds.shape[1])
        return F.ctc_loss(scores, words, times, torch.full((len(words),), words.shape[1]))

    return Fitted(SpeechRecogniser(), loss)


# -- generative --------------------------------------------------------------------------------------------------


class GAN(Manual):
    """MONAI's networks, trained in turn as in Lightning's GAN tutorial, with `toggle_optimizer`."""

    def __init__(self) -> None:
        from monai.networks.nets import Discriminator, Generator

        super().__init__()
        self.generator = Generator(latent_shape=(8,), start_shape=(8, 4, 4), channels=(8, 4, 1), strides=(2, 2, 1))
        self.discriminator = Discriminator(in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2), num_res_units=1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        total = torch.zeros(())
        for optimizer, network in zip(self.optimizers(), ("generator", "discriminator"), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for images, noise in self.parts(batch):
                loss = self.loss(network, images, noise) / self.accumulate
                self.manual_backward(loss)
                total = total + loss.detach()
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return {"loss": total}

    def loss(self, network: str, images: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        if network == "generator":
            return -self.discriminator(made).log().mean()
        return -(self.discriminator(images).log() + (1 - self.discriminator(made.detach())).log()).mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-4) for n in networks]


def ddpm() -> pl.LightningModule:
    from diffusers import DDPMScheduler, UNet2DModel

    schedule = DDPMScheduler(num_train_timesteps=100)
    net = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, noise, times = batch
        return F.mse_loss(model(schedule.add_noise(images, noise, times), times).sample, noise)

    return Fitted(net, loss)


# -- language ----------------------------------------------------------------------------------------------------


def lora() -> pl.LightningModule:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    adapters = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return Fitted(
        get_peft_model(LlamaForCausalLM(config), adapters),
        lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
    )


def x_transformer() -> pl.LightningModule:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=3, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    net = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers))
    return Fitted(net, lambda model, batch: model(batch[0]))


def lightning_demo() -> pl.LightningModule:
    from lightning.pytorch.demos import LightningTransformer

    module = LightningTransformer(vocab_size=VOCABULARY)
    module.prepare_data = lambda: None  # it would download WikiText-2
    return module
