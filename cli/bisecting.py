"""`layerfuse bisect`: what runs on stderr, a line for each run as it comes, and at the end what moves a number, and how far."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.errors import FOREIGN, first_of, said, shown
from .models import find_model, registry_with
from .progress import progress
from .verifying import quiet

if TYPE_CHECKING:
    from ..bisecting import Matched


def answer_bisect(
    name: str,
    prompts: Path,
    *,
    tolerance: float | None,
    greedy: bool,
    report: Path | None,
    files: Sequence[Path],
    device: str | None,
) -> None:
    """Find what moves the model's numbers, and print it.

    Raises:
        SystemExit: with 1, where something does.
        CannotVerifyError: something that is needed is not installed, or the folder holds no model.
        ConfigError: its config or the report cannot be read, or nothing that the report says is fused can be fused in it.
        UnknownModelError: it is no folder or config.json, and no entry has this name.
        PromptsError: the file holds something else than token ids.
        NothingRanError: nothing was fused in it, with the reasons.
        FusionConfigError: LAYERFUSE_FUSIONS names a fusion that does not exist.
    """
    from .. import bisecting as job
    from .. import verify
    from ..fusion import FusionConfig
    from ..fusion.config import ENVIRONMENT
    from ..testing.recipes import VOCABULARY

    registry, folder = registry_with(files), Path(name)
    entry = None if folder.is_dir() else find_model(name, files, registry)
    rows = job.prompts_in(prompts, _vocabulary(folder) if entry is None else VOCABULARY)
    FusionConfig.from_environment()
    reported = None if report is None else job.reported_in(report)
    with progress() as doing:
        verify.require([] if entry is None else [entry], device)
        quiet()
        if entry is None:
            doing(f"loading {folder}", None)
            model = _loaded(folder)
        else:
            from ..testing import small_model

            doing(f"building a small {entry.name}", None)
            few = verify.one_of_each(entry)
            model = small_model(few, layers=few.num_hidden_layers)
        model = model.to(verify.device_of(device))
        among = None if reported is None or report is None else _among(report, job.matched(model, reported, registry))
        found = job.bisect(
            model,
            rows,
            tolerance=tolerance,
            greedy=greedy,
            among=among,
            registry=registry,
            step=lambda line: print(line, flush=True),
            begin=lambda line: doing(line, None),
        )
    if found is None:
        print("no fusion moves a number too far")
        return
    print("only together:" if len(found.pairs) > 1 else "found:")
    for site, fusion in found.pairs:
        print(f"  {fusion} at {site}")
    print(f"  {found.moved}")
    print(f"without {'them' if len(found.pairs) > 1 else 'it'}: {found.others}")
    for fusion, moved in found.apart.items():
        print(f"{fusion} by itself: {moved}")
    if found.others.beyond:
        line = without(os.environ.get(ENVIRONMENT, ""), dict.fromkeys(fusion for _, fusion in found.pairs), found.left)
        how = f"another run with {ENVIRONMENT}={line} finds what else moves numbers"
        print(f"what is named was found first: {how if found.left else 'other sites of the same move numbers too'}")
    raise SystemExit(1)


def without(line: str, found: Collection[str], left: Iterable[str]) -> str:
    """What `LAYERFUSE_FUSIONS` is to say instead of this line to leave out what was found; `left` is what else ran, which `all` stands for."""
    words = [*filter(None, map(str.strip, line.split(",")))]
    if words and words[0][0] not in "+-":
        return ",".join(name for name in (left if words == ["all"] else words) if name not in found)
    return ",".join([*(word for word in words if word[1:] not in found), *(f"-{name}" for name in found)])


def _among(report: Path, matched: Matched) -> tuple[tuple[str, str], ...]:
    """What of a report is searched; what is not is printed, with the reason.

    Raises:
        ConfigError: nothing is.
    """
    from ..registry.inspect import ConfigError

    reasons: dict[tuple[str, str], list[str]] = {}
    for (site, fusion), why in matched.unmatched.items():
        reasons.setdefault((fusion, why), []).append(site)
    left = [f"not searched: {fusion} at {first_of(sites)}: {why}" for (fusion, why), sites in reasons.items()]
    if not matched.pairs:
        raise ConfigError(str(report), left or ["says of no fusion that it is fused"])
    for before, after in matched.renamed.items():
        print(f"{before} of the report is taken for {after}", flush=True)
    print("\n".join(left), end="\n" if left else "", flush=True)
    return matched.pairs


def _vocabulary(folder: Path) -> int | None:
    """How many tokens the model of a folder knows, if its config says it.

    Raises:
        CannotVerifyError: the folder holds no model.
        ConfigError: its config cannot be read.
    """
    from ..registry.hf_config import text_part
    from ..registry.inspect import read_config
    from ..verify import CannotVerifyError

    if not (folder / "config.json").is_file():
        raise CannotVerifyError(
            f"there is no config.json in {shown(str(folder), 400)}: expected a folder with config.json and weights, or the name of a declared "
            "model (`layerfuse models` lists them)"
        )
    said = text_part(read_config(folder))[0].get("vocab_size")
    return said if type(said) is int else None


def _loaded(folder: Path) -> Any:
    """The model in a folder, in the dtype of its weights.

    Raises:
        CannotVerifyError: transformers does not load it.
    """
    import transformers

    from ..verify import CannotVerifyError

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except FOREIGN as error:
        raise CannotVerifyError(f"{folder}: transformers does not load it: {said(error)}") from None
    return model.eval().requires_grad_(False)
