"""Trains the byte-level demo model: about two minutes on one H200; `--steps 20 --batch-size 4` to try it on a CPU."""

import argparse
import json
import platform
from pathlib import Path

import tokenizers
import torch
import transformers
from tiny_lm.corpus import Corpus
from tiny_lm.model import add_residual_dropout, build_model
from tiny_lm.saving import save_card, save_model
from tiny_lm.training import LONG_WINDOW, WINDOW, Settings, bits_per_byte, train


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128, help=f"windows of {WINDOW} bytes per step")
    parser.add_argument("--max-seconds", type=float, default=360, help="finish earlier, learning rate decayed")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (used on CUDA only)")
    parser.add_argument("--log-json", type=Path, help="write a record of the run")
    return parser.parse_args()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    modules = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers}
    return {"python": platform.python_version()} | {name: str(m.__version__) for name, m in modules.items()}


def main() -> None:
    args = parse_arguments()
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.device, args.seed)
    model = build_model(args.seed).to(args.device)
    add_residual_dropout(model, args.dropout)
    compiled = args.device.startswith("cuda") and not args.no_compile
    step_model = torch.compile(model, dynamic=False) if compiled else model
    settings = Settings(args.steps, args.batch_size, args.max_seconds, args.learning_rate, args.eval_every)
    outcome = train(model, step_model, corpus, settings)
    save_model(model, args.out)
    record = {
        "seed": args.seed,
        "versions": versions(),
        "device": device_name(args.device),
        "params": model.num_parameters(),
        "corpus_sha256": corpus.sha256,
        "bits_per_byte": bits_per_byte(model, corpus, WINDOW),
        "bits_per_byte_2048": bits_per_byte(model, corpus, LONG_WINDOW),
        **{name: value for name, value in vars(outcome).items() if name not in ("best_weights", "best_bits")},
        "settings": vars(settings) | {"dropout": args.dropout, "compiled": compiled},
    }
    command = f"python examples/train_tiny_lm.py --out tiny-lm --seed {args.seed} --steps {args.steps}"
    options = f" --batch-size {args.batch_size} --learning-rate {args.learning_rate} --dropout {args.dropout}"
    save_card(record, command + options, args.out)
    print(f"saved {args.out}: {record['bits_per_byte']:.4f} bits/byte held out, {outcome.seconds:.0f} s")
    if args.log_json:
        args.log_json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
