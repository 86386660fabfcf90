"""Put a drafter that `outrider distill` made into the package, for everyone who runs its target.

    python tools/ship_drafter.py FOLDER NAME [--target REF] [--called NAME] [--bench FILE ...]
        [--licence NAME]

Folds the weights to one byte each, copies vocabulary and card, and enters the drafter in the index
under its target's fingerprint. Rows of `outrider bench --json` files become a table in the card.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

from outrider.drafters.registry import FOLDER, INDEX, target_fingerprint
from outrider.models import check_same_tokenizer, load_model
from outrider.models.compact import fold
from outrider.training.card import PROVENANCE

MOST_MB = 16.0


def figures(files: list[Path]) -> str:
    """A table of benchmark rows in Markdown, one row for every task, temperature and top-p.

    Their alpha is the share of examined drafts that were accepted, copies by lookup among them.
    """
    lines = [
        "| task | temperature | top-p | alpha, counted | tokens per pass | speed-up |",
        "|---" * 6 + "|",
    ]
    for file in files:
        facts = json.loads(file.read_text(encoding="utf-8"))
        top_p = facts["provenance"]["arguments"].get("top_p", 1.0)
        for row in facts["rows"]:
            lines.append(
                f"| {row['task']} | {row['temperature']:g} | {top_p:g} | "
                f"{'-' if row['alpha_hat'] is None else format(row['alpha_hat'], '.2f')} | "
                f"{row['tokens_per_call']:.2f} | {row['speedup']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--target", default="default")
    parser.add_argument("--called", help="the target's name in the card, where REF is none")
    parser.add_argument("--bench", type=Path, nargs="*", default=[])
    parser.add_argument("--licence", default="Apache-2.0", help="the target's")
    arguments = parser.parse_args()
    out = FOLDER / arguments.name
    target = load_model(arguments.target)
    check_same_tokenizer(target, load_model(str(arguments.folder)))
    fingerprint = target_fingerprint(target)
    assert fingerprint, f"{arguments.target} cannot be told from other models"
    card = (arguments.folder / "README.md").read_text(encoding="utf-8")
    if arguments.called:
        target_name = re.escape(target.name)
        card, num_named = re.subn(rf"\b(for|that) {target_name}\b", rf"\1 {arguments.called}", card)
        assert num_named, f"the card does not name {target.name}"
    card += f"\nLicence: {arguments.licence}.\n"
    if arguments.bench:
        card += f"\nBy `outrider bench`, beside plain decoding:\n\n{figures(arguments.bench)}\n"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as beside:
        made = Path(beside) / arguments.name
        fold(arguments.folder, made)
        (made / "README.md").write_text(card, encoding="utf-8")
        shutil.copy(arguments.folder / PROVENANCE, made / PROVENANCE)
        size_mb = sum(file.stat().st_size for file in made.iterdir()) / 1e6
        assert size_mb <= MOST_MB, f"{size_mb:.1f} MB; at most {MOST_MB} are shipped"
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
    index = FOLDER / INDEX
    entries = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
    entries[fingerprint] = arguments.name
    index.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{out}: {size_mb:.1f} MB, for {fingerprint}")


if __name__ == "__main__":
    main()
