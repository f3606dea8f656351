"""The architecture: a Qwen3 with 3.7 million parameters, every second layer with a sliding window."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from .corpus import EOS, VOCAB_SIZE

LAYERS = 6
SLIDING_WINDOW = 128


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        attn_implementation="sdpa",
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)


def add_residual_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Qwen3 has no dropout on its residual branches; hooks add it for training and leave no trace in the weights."""

    def drop(module: nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def token_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy in nats, in float32 whatever autocast does."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
