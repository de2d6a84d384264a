"""Go offline at once if the hub cannot be reached, in place of a timeout for every request."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request

import datasets.config
import huggingface_hub.constants

PROBE_SECONDS = 5.0


def go_offline() -> None:
    """Make every Hugging Face client of this process use its cache only."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # the libraries have read the environment already, when they were imported
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


def offline_unless_reachable() -> bool:
    """Whether the hub answers; if it does not within a few seconds, go offline and say so. Any HTTP answer counts."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    if _answers(huggingface_hub.constants.ENDPOINT):
        return True
    print(f"warning: {huggingface_hub.constants.ENDPOINT} does not answer; using local caches only", file=sys.stderr)
    go_offline()
    return False


def _answers(url: str) -> bool:
    finished, answered = threading.Event(), threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_SECONDS).close()
            answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            pass
        finished.set()

    # a thread, because looking up a name has no time limit of its own
    threading.Thread(target=ask, daemon=True).start()
    finished.wait(PROBE_SECONDS)
    return answered.is_set()
