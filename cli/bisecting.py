"""`layerfuse bisect`: a line for each run as it comes, and at the end what moves a number, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..adapters.errors import said
from .models import registry_with
from .verifying import quiet


def answer_bisect(
    name: str, prompts: Path, *, tolerance: float | None, greedy: bool, files: Sequence[Path], device: str | None
) -> None:
    """Find what moves the model's numbers, and print it.

    Raises:
        SystemExit: with 1, where something does.
        CannotVerifyError: something that is needed is not installed, or the folder holds no model.
        UnknownModelError: it is no folder, and no entry has this name.
        PromptsError: the file holds something else than token ids.
        FusionConfigError: LAYERFUSE_FUSIONS names a fusion that does not exist.
    """
    from .. import bisecting as job
    from .. import verify
    from ..fusion import FusionConfig

    rows, registry = job.prompts_in(prompts), registry_with(files)
    FusionConfig.from_environment()
    folder = Path(name)
    entry = None if folder.is_dir() else registry.model(name)
    verify.require([] if entry is None else [entry], device)
    quiet()
    if entry is None:
        model = _loaded(folder)
    else:
        from ..testing import small_model

        few = verify.one_of_each(entry)
        model = small_model(few, layers=few.num_hidden_layers)
    found = job.bisect(
        model.to(verify.device_of(device)),
        rows,
        tolerance=tolerance,
        greedy=greedy,
        registry=registry,
        step=lambda line: print(line, flush=True),
    )
    if found is None:
        print("no fusion moves a number")
        return
    print("only together:" if len(found.pairs) > 1 else "found:")
    for site, fusion in found.pairs:
        print(f"  {fusion} at {site}")
    print(f"  {found.moved}")
    print(f"without {'them' if len(found.pairs) > 1 else 'it'}: {found.others}")
    raise SystemExit(1)


def _loaded(folder: Path) -> Any:
    """The model in a folder, in the dtype of its weights.

    Raises:
        CannotVerifyError: transformers does not load it.
    """
    import transformers

    from ..verify import CannotVerifyError

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CannotVerifyError(f"{folder}: transformers does not load it: {said(error)}") from None
    return model.eval().requires_grad_(False)
