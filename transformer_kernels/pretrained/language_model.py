"""A loaded GPT with its tokenizer: text in, text out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from python_ref import GPT
from transformer_kernels.pretrained.generation import Sampling, generate_many
from transformer_kernels.pretrained.tokenizers import end_tokens, load_tokenizer

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Prompt = TypeVar("Prompt", str, list[str], list[int], Tensor)


class PretrainedGPT(GPT):
    """A `python_ref.GPT` from a folder or GGUF file. `source` is its path."""

    source: Path

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder, loaded at its first use; raises as `load_tokenizer`."""
        return load_tokenizer(self.source, self.config.vocab_size)

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """The end-of-text ids in the folder's configuration."""
        return end_tokens(self.source)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 40,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> Prompt:
        """Continue a text, or tokens, with a KV cache.

        Args:
            prompt: a string, a list of strings, a list of tokens, or tokens (L) or (B, L) of an integer dtype.
            max_new_tokens: the number of tokens to generate; fewer where the text ends earlier.
            temperature: divides the logits; 0 selects the most likely token.
            top_k: sample from the `top_k` most likely tokens; 0 means all.
            top_p: sample from the smallest set of tokens with this cumulative probability.
            repetition_penalty: values above 1 reduce the probability of tokens that already occur.
            seed: of the random generator of the first prompt; prompt n has seed + n.

        Returns:
            the prompt and its continuation, of the type of `prompt`. Tokens (B, L) are int64 on the device of the
            prompt; rows that end early are filled with their end token.

        Raises:
            TypeError: the prompt has another type.
            ValueError: an empty prompt, or a sampling parameter out of its range.
            ImportError, FileNotFoundError: the prompt is text, and the folder has no tokenizer (`load_tokenizer`).

        Examples:
            >>> folder = tempfile.mkdtemp()
            >>> tk.export_pretrained(tk.build("gpt2", vocab_size=65, layers=1, width=64, heads=2), folder)
            >>> tk.load_pretrained(folder).generate(torch.tensor([1, 2, 3]), max_new_tokens=5).shape
            torch.Size([8])
        """
        rows, is_text = self._encoded(prompt)
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
        )
        continuations = self._continuations(rows, max_new_tokens, sampling)
        if is_text:
            prompts: Any = [prompt] if isinstance(prompt, str) else prompt
            texts = [self._text(*parts) for parts in zip(prompts, rows, continuations, strict=True)]
            return texts[0] if isinstance(prompt, str) else texts  # type: ignore[return-value]
        whole = [row + continuation for row, continuation in zip(rows, continuations, strict=True)]
        if not isinstance(prompt, Tensor):
            return whole[0]  # type: ignore[return-value]
        longest = max(map(len, whole))
        filled = torch.tensor([row + row[-1:] * (longest - len(row)) for row in whole], device=prompt.device)
        return filled.view(*prompt.shape[:-1], longest)

    def _encoded(self, prompt: Any) -> tuple[list[list[int]], bool]:
        """The tokens of each prompt, and whether they encode text."""
        if isinstance(prompt, Tensor) and prompt.dim() in (1, 2) and prompt.dtype in INTEGERS:
            return (prompt if prompt.dim() == 2 else prompt.unsqueeze(0)).tolist(), False
        texts = [prompt] if isinstance(prompt, str) else prompt
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            return [self.tokenizer.encode(text).ids for text in texts], True
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return [prompt], False
        raise TypeError(f"generate: prompt must be text, tokens (L) or (B, L), or a list of either; got {prompt!r}")

    def _continuations(self, rows: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
        """The new tokens of each row, up to its end token and including it."""
        training, device = self.training, next(self.parameters()).device
        try:
            options: Any = {"context": self.config.context, "device": device, "ends": self.end_tokens}
            steps = [
                [sampled.token for sampled in step] for step in generate_many(self, rows, count, sampling, **options)
            ]
        finally:
            self.train(training)
        written: list[list[int]] = []
        for tokens in zip(*steps, strict=True) if steps else [()] * len(rows):
            ended = next((index for index, token in enumerate(tokens) if token in self.end_tokens), len(tokens))
            written.append(list(tokens[: ended + 1]))
        return written

    def _text(self, prompt: str, tokens: list[int], continuation: list[int]) -> str:
        """The prompt as it was given, followed by the decoded continuation."""
        before = len(self.tokenizer.decode(tokens))
        return prompt + self.tokenizer.decode(tokens + continuation)[before:]
