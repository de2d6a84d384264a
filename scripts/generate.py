"""Continue a text with a trained model: `python -m scripts.generate checkpoint=RUN prompt="Once upon a time"`."""

from __future__ import annotations

import sys
import time

from efla_lm.devices import choose_device
from efla_lm.evaluation import checkpoints, hub
from efla_lm.evaluation.completion import complete
from efla_lm.evaluation.settings import GenerateSettings
from efla_lm.evaluation.tokens import TokenPolicy
from efla_lm.settings import entry


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
