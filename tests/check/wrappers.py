"""What people wrap models in: heads in float32, quantised weights and activations, adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Wrap = Callable[[PreTrainedModel], nn.Module]


class FloatLogits(nn.Module):
    """Ends in `logits.float()`, as models did in transformers 4."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: Any = 0, use_cache: bool = False) -> Tensor:
        more = {"logits_to_keep": logits_to_keep, "use_cache": use_cache}
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, **more).logits
        return logits.float()


def torchao(name: str, **settings: Any) -> Wrap:
    def wrap(model: PreTrainedModel) -> nn.Module:
        import torchao.quantization as quantization

        quantization.quantize_(model, getattr(quantization, name)(**settings))
        return model

    return wrap


def bitsandbytes_nf4(model: PreTrainedModel) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    def quantised(linear: nn.Linear) -> nn.Module:
        new = Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=linear.weight.dtype, quant_type="nf4"
        )
        new.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = linear.bias
        return new

    return _with_linears(model, quantised).to("cpu")


def bitsandbytes_int8(model: PreTrainedModel) -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    def quantised(linear: nn.Linear) -> nn.Module:
        new = Linear8bitLt(linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False)
        new.load_state_dict(linear.state_dict())
        return new

    return _with_linears(model, quantised).to("cpu")


def compressed_tensors(model: PreTrainedModel) -> nn.Module:
    """Weights in 8 bits for each channel, activations in 8 bits for each token."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, symmetric=True, strategy="channel"),
        input_activations=QuantizationArgs(num_bits=8, symmetric=True, dynamic=True, strategy="token"),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen"))
    for module in model.modules():
        if isinstance(getattr(module, "weight_scale", None), nn.Parameter):
            with torch.no_grad():
                module.weight_scale.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
    return model


def lora(model: PreTrainedModel) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear) and "attn" in name}
    names = names or {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    return get_peft_model(model, LoraConfig(r=4, target_modules=sorted(names), init_lora_weights=False)).eval()


def _with_linears(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Every plain linear but the head made anew."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, make(child))
    return model


WRAPPERS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "logits.float()": FloatLogits,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao dynamic int8": torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes nf4": bitsandbytes_nf4,
    "bitsandbytes int8": bitsandbytes_int8,
    "compressed-tensors W8A8": compressed_tensors,
    "peft LoRA": lora,
}
