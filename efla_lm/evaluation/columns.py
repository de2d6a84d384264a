"""The columns of the paper's Table 1 and the metric of each [paper, section 3]."""

from __future__ import annotations

# (heading, task, metric as lm-eval writes it, it is one of the nine accuracies)
PAPER_COLUMNS = (
    ("Wiki ppl", "wikitext", "word_perplexity,none", False),
    ("LMB ppl", "lambada_openai", "perplexity,none", False),
    ("LMB acc", "lambada_openai", "acc,none", True),
    ("PIQA acc", "piqa", "acc,none", True),
    ("Hella acc_n", "hellaswag", "acc_norm,none", True),
    ("Wino acc", "winogrande", "acc,none", True),
    ("ARC-e acc", "arc_easy", "acc,none", True),
    ("ARC-c acc_n", "arc_challenge", "acc_norm,none", True),
    ("BoolQ acc", "boolq", "acc,none", True),
    ("OBQA acc_n", "openbookqa", "acc_norm,none", True),
    ("SciQ acc", "sciq", "acc,none", True),
)

PAPER_TASKS = tuple(dict.fromkeys(task for _, task, *_ in PAPER_COLUMNS))  # the ten, in the order of the columns
