"""Byte-level training data: the shipped corpus as one stream of token ids, cut into windows."""

import hashlib
import lzma
from pathlib import Path

import torch

EOS = 256
VOCAB_SIZE = 257
HELD_OUT_FRACTION = 0.05
CORPUS = Path(__file__).parent.parent / "data" / "corpus.txt.xz"


def encode_documents(text: bytes) -> torch.Tensor:
    """Each chapter becomes `EOS, bytes...`; one EOS closes the stream."""
    ids = [EOS]
    for chapter in text.strip().split(b"\n\n\n"):
        ids += [*chapter, EOS]
    return torch.tensor(ids)


class Corpus:
    def __init__(self, device: str, seed: int, path: Path = CORPUS):
        text = lzma.decompress(path.read_bytes())
        stream = encode_documents(text)
        cut = int(len(stream) * (1 - HELD_OUT_FRACTION))
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.train, self.held_out = stream[:cut].to(device), stream[cut:].to(device)
        # A window that begins one position before a paragraph has a newline or EOS there.
        newline = stream[:cut] == ord("\n")
        self.before_paragraph = torch.nonzero(newline[1:] & newline[:-1]).flatten() + 1
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, window: int, aligned_fraction: float = 0.25) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows; a fraction of them are `EOS` followed by the start of a paragraph."""
        starts = torch.randint(len(self.train) - window, (rows,), generator=self.generator)
        aligned = round(rows * aligned_fraction)
        picks = torch.randint(len(self.before_paragraph), (aligned,), generator=self.generator)
        starts[:aligned] = self.before_paragraph[picks].clamp(max=len(self.train) - window - 1)
        offsets = torch.arange(window + 1, device=self.train.device)
        chunk = self.train[starts.to(self.train.device)[:, None] + offsets]
        inputs = chunk[:, :-1].clone()
        inputs[:aligned, 0] = EOS
        return inputs, chunk[:, 1:]

    def held_out_windows(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows side by side, so that every held-out token but the first is predicted once (a short tail is cut)."""
        count = (len(self.held_out) - 1) // window
        size = count * window
        return self.held_out[:size].view(count, window), self.held_out[1 : size + 1].view(count, window)
