"""Continue a text with a trained model: `python -m scripts.generate checkpoint=RUN prompt="Once upon a time"`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints, hub
from efla_lm.evaluation.completion import complete
from efla_lm.evaluation.settings import CHECKPOINT, check_seed
from efla_lm.evaluation.tokens import TokenPolicy
from efla_lm.settings import entry
from efla_lm.settings.fields import MISSING, PATH_OR_HUB, key


@dataclass
class GenerateSettings:
    """All of `python -m scripts.generate`."""

    checkpoint: str = key(MISSING, CHECKPOINT, path=PATH_OR_HUB)
    prompt: str = key(MISSING, "text to continue")
    max_new_tokens: int = key(100, "most tokens to add; EOS ends earlier")
    temperature: float = key(0.0, "0: the most probable token each time; above: sampling")
    top_p: float = key(1.0, "sample from the smallest set of tokens with this probability")
    top_k: int | None = key(None, "sample from this many tokens; null: all")
    seed: int = key(42, "seed of sampling")
    dtype: str = key("fp32", "type of weights and activations", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    bos: str = key("auto", "prompt opens with BOS; auto: as the tokenizer does it", choices=("auto", "always", "never"))

    def validate(self) -> None:
        """Raise UserError for values that no generation can mean. Called once by `entry`, before a model is loaded."""
        check_seed(self.seed)
        if self.temperature == 0 and (self.top_k is not None or 0 < self.top_p < 1):
            given = f"top_p={self.top_p}" if self.top_k is None else f"top_k={self.top_k}"
            raise UserError(
                f"{given} says what is sampled from, but temperature=0 takes the most probable token each time: set "
                "temperature, e.g. 0.8, or leave it out"
            )
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise UserError("prompt: expected text, got bytes that are not UTF-8; set the terminal's encoding to UTF-8")


@entry("generate", GenerateSettings)
def main(settings: GenerateSettings) -> None:
    """Stream a continuation of the prompt to stdout; where it came from and its speed go to stderr."""
    checkpoint = checkpoints.find(settings.checkpoint)
    if checkpoint.kind == "hub":
        hub.offline_unless_reachable()
    model, tokenizer = checkpoints.load(checkpoint)
    checkpoints.place(model, settings.dtype, choose_device(settings.device))
    print(f"model: {checkpoint.location}", file=sys.stderr)
    print(settings.prompt, end="", flush=True)
    start = time.perf_counter()
    count = complete(
        model,
        TokenPolicy(tokenizer, settings.bos),
        settings.prompt,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        on_text=lambda text: print(text, end="", flush=True),
    )
    print(flush=True)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.0f} tokens/s)", file=sys.stderr)


if __name__ == "__main__":
    main()
