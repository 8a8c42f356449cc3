"""The commands, with their options and help. Each imports its implementation when it runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..adapters.spec_fields import LARGEST
from .fusions import fusion_names, list_fusions

if TYPE_CHECKING:
    from collections.abc import Callable


def _names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Model names for the shell's completion."""
    from ..registry.entries import shipped_tables

    names = [name for key, table in shipped_tables().items() for name in (key, *table.get("aliases", ()))]
    return [name for name in names if name.startswith(incomplete.lower())]


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)
_model = click.argument("model", shell_complete=_names)
_count = click.IntRange(1, LARGEST)

_files = click.option(
    "--models", "files", metavar="FILE", multiple=True, type=_FILE, help="Know the models of this file too. Repeatable."
)
_json = click.option("--json", "json", is_flag=True, help="Plain JSON, for programs.")


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .._version import version_text

        click.echo(f"layerfuse {version_text()}")
        ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version, and the commit where it is known.",
)
def app() -> None:
    """What a model's layers are, which kernel fusions they take, and proof that they did.

    \b
    Exit codes:
      0  all is well
      1  the answer is no, or problems were found
      2  a usage error: an unknown option, model, target,
         engine or fusion, or a file that does not exist
      141  no answer: its reader went before its end, as `head`
         does, of a command whose exit code is its answer

    \b
    Environment:
      LAYERFUSE_FUSIONS=none|all|NAME,...     which fusions are wanted: these alone
      LAYERFUSE_FUSIONS=+NAME,-NAME,...       beside what is on by default
      LAYERFUSE_BACKEND=NAME                  the one backend to use
      LAYERFUSE_STRICT=1                      in SGLang: an expected fusion that is missed stops it
      LAYERFUSE_REPORT=FILE                   in SGLang: where the report goes
      LAYERFUSE_SHADOW=N                      compare N calls of each fused op with its reference
      LAYERFUSE_PDL=0                         no kernel starts while the one before it ends
      LAYERFUSE_TRACEBACK=1                   show the traceback behind an error message
      NO_COLOR=1                              no colours on a terminal either
    """


def _wanted_elsewhere(_: click.Context, __: click.Parameter, names: str | None) -> None:
    """What vLLM's option is called, an environment variable is here."""
    if names is not None:
        raise click.UsageError(
            f"which fusions are wanted is said by LAYERFUSE_FUSIONS, as LAYERFUSE_FUSIONS={names} layerfuse plan ..."
        )


def _command(summary: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with its line in the list of all, which is short enough to stand there whole."""
    return app.command(short_help=f"{summary}.")


@_command("List the declared models")
@_files
@_json
def models(files: tuple[Path, ...], json: bool) -> None:
    """List the declared models.

    \b
    Example:
      layerfuse models --models mine.toml
    """
    from .listing import list_models

    list_models(files, json)


@_command("Which fusions stand at how many sites of a model, and why not")
@click.argument("model", required=False, shell_complete=_names)
@click.option("--tp", type=click.IntRange(1, 1 << 20), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which of the ranks.")
@click.option(
    "--target",
    help="h200, mi355x, another usual GPU, any gfxNNN or smNN, or cpu. By default gfx950; with --engine transformers, vllm or sglang the GPU of this machine, or sm90 without one.",
)
@click.option(
    "--engine",
    type=str.lower,
    metavar="NAME",
    help="Plan for this engine: with the epsilons that it builds norms with, and without the fusions that are off "
    "there: transformers, vllm, sglang or atom.",
)
@click.option(
    "--engine-version", metavar="VERSION", help="Release of vLLM, as 0.33 or v0.33.1; the newest known if not given."
)
@click.option("--enforce-eager", is_flag=True, help="vLLM is started with the option of this name.")
@click.option(
    "--quant",
    metavar="[ROLE=]HOW",
    multiple=True,
    help="By default the linears are as published, where the model's entry or config says it; else it is not known whether they quantise, and what stands on that depends. HOW says it: "
    "none, or the format of their activations, static, per_token, group32, group64 or group128 in fp8 or another by its name, as mxfp8. Behind it may stand how scales lie, "
    "as in group128,column_major,ue8m0: column_major, tma_aligned, ue8m0, swizzled (in tiles, as vLLM's linears have NVFP4's); and inside, where the product's op quantises, as in vLLM's linears of FlashInfer. "
    "It is of every role but final, or of one: input, post_attention, final, latents, output, activation, linear or experts. Routed experts stay as published, unless none is quantised or experts=HOW says it. Fusions that take this in change numerics, so this plans at "
    "level 2. Repeatable.",
)
@click.option("--batch", metavar="N", type=_count, help="Show attention's buffers for N sequences a step.")
@click.option("--queries", metavar="N", type=_count, help="Per sequence and step: 1 + speculated tokens.")
@click.option("--context", metavar="N", type=_count, help="Tokens of a sequence, for the size of the cache.")
@click.option("--kv", type=click.Choice(["bf16", "fp8"]), help="Dtype of the cache, and of MLA's queries.")
@click.option(
    "--aiter", "release", metavar="RELEASE", help="AITER's release, as v0.1.18; the newest known if not given."
)
@click.option("--fusions", hidden=True, expose_value=False, callback=_wanted_elsewhere)
@click.option("--all-tp", is_flag=True, help="Matrices instead: models against tensor-parallel sizes.")
@click.option("-v", "--verbose", is_flag=True, help="Also each kind of layer: its dimensions, and what stands where.")
@_files
@_json
@click.option("--svg", metavar="FILE", type=_NEW_FILE, help="Write the answer as a picture.")
def plan(model: str | None, all_tp: bool, tp: int, rank: int, engine: str | None, **asked: Any) -> None:
    """Show which fusions stand at how many sites of a model, and each reason once, with a number. Needs no torch.

    MODEL is a declared name (`layerfuse models`), or the path of a config.json or of its folder.

    "off": it could stand there, and LAYERFUSE_FUSIONS switches it on. "no": it has no place there, or what it would fuse
    is not there, or the engine does it itself. "depends": on the number of tokens, on whether a longer fusion is missed, or on what a plan cannot know, as whether a
    checkpoint's linears quantise (--quant says so). With -v it also shows each kind of layer on one rank.

    With --batch, --queries, --context, --kv or --aiter it also shows what attention allocates: the heads that AITER's MLA
    decode is given, its buffers and scratch, cache and state, and known issues of the release. With --all-tp it
    shows the heads of all MLA models, or of MODEL, at every tensor-parallel size, and up to how many tokens all-reduces
    are fused there.

    Exits with 1 where the model cannot be sharded that way.

    \b
    Keys of the JSON:
      model, hf_id, adapter, tp, rank, engine, num_hidden_layers, notes
      engine_does  fusion -> where the engine does the same itself
      target   {arch, vendor, fp8, aiter}
      config   which fusions were wanted
      published  how the checkpoint's linears are quantised, where the
               plan is of that: a list of texts
      alike    the declared model of another model_type that has the
               layers of a config.json, or null
      defaults  what a config.json leaves out and transformers has by
               default, as far as the plan follows from it
      kinds    a list of {kind, family, count, layers, spec, sites};
               sites: role -> a list of {fusion, decision, reason,
               tokens, sites}, decision: expected, fallback, refused
               or not_applicable; sites: how many it is true of
      attention  {batch, queries, context, kv, aiter, groups, cache,
               state_bytes_per_sequence, bytes}, where asked for
    With --all-tp:
      target, kv, aiter, queries, degrees
      models   a list of {model, num_heads, cells}; a cell is {tp,
               local_heads, kernel_heads, how, waste_percent, refused}
      all_reduce  a list of {model, cells}; a cell is {tp, tokens,
               stages, reason, refused}; tokens: null for any number

    \b
    Examples:
      layerfuse plan kimi-k2.5 --tp 8 --target gfx942
      layerfuse plan deepseek-v3 --tp 8 --quant group128
      layerfuse plan kimi-linear-48b-a3b --target sm90 --engine vllm
      layerfuse plan kimi-k2.5 --tp 8 --batch 256 --context 131072 --kv fp8
      layerfuse plan --all-tp --aiter v0.1.18 --svg heads.svg
      layerfuse plan moonshotai/Kimi-Linear-48B-A3B-Instruct --tp 4 --svg plan.svg
    """
    if asked["json"] and asked["svg"] is not None:
        raise click.UsageError("give either --json or --svg")
    if (asked["engine_version"] is not None or asked["enforce_eager"]) and engine != "vllm":
        raise click.UsageError("--engine-version and --enforce-eager go with --engine vllm")
    attention = {name: asked.pop(name) for name in ("batch", "queries", "context", "kv", "release")}
    if attention["release"] is not None and not attention["release"].strip():
        raise click.BadParameter("expected a release, as v0.1.18, got an empty text", param_hint="--aiter")
    from ..fusion import backends

    backends.check_declared()  # what is planned would run with it
    if all_tp:
        others = attention["batch"], attention["context"], engine, asked["quant"]
        if others != (None, None, None, ()) or (tp, rank) != (1, 0):
            raise click.UsageError(
                "--all-tp shows every size, and takes --target, --kv, --aiter and --queries: no other option goes with it"
            )
        from .matrix import answer_matrix
        from .planning import DEFAULT_TARGET

        answer_matrix(
            model,
            target=asked["target"] or DEFAULT_TARGET,
            kv=attention["kv"] or "bf16",
            release=attention["release"],
            queries=attention["queries"] or 1,
            **{name: asked[name] for name in ("files", "json", "svg")},
        )
        return
    if rank >= tp:
        raise click.BadParameter(f"ranks are 0 to {tp - 1} at --tp {tp}, got {rank}", param_hint="--rank")
    if model is None:
        raise click.UsageError("give a model, or --all-tp for all of them")
    from .planning import answer_plan

    given = {name: value for name, value in attention.items() if value is not None}
    answer_plan(model, tp=tp, rank=rank, engine=engine, attention=given, **asked)


@_command("Build small real models, fuse them, and compare")
@click.argument("names", metavar="[MODEL]...", nargs=-1, shell_complete=_names)
@click.option("--all-small", is_flag=True, help="Every declared model that transformers can build.")
@_files
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; the GPU if there is one.")
@click.option("--json", "json", metavar="FILE", type=_NEW_FILE, help="Also write the results as JSON.")
def verify(names: tuple[str, ...], all_small: bool, **asked: Any) -> None:
    """Build small real models with true head and latent widths, fuse them, and compare with the unfused ones.

    Without names: DeepSeek-V3, Kimi-K2.5, Kimi-Linear and GPT-OSS. Needs torch, transformers and a C++ compiler, and
    downloads nothing. Exits with 1 where an expected fusion did not happen or a difference is over its tolerance.

    \b
    Example:
      layerfuse verify deepseek-v3 kimi-linear-48b-a3b
    """
    if all_small and names:
        raise click.UsageError("give either model names or --all-small")
    from .verifying import answer_verify

    answer_verify(names, all_small=all_small, **asked)


def _config(_: click.Context, __: click.Parameter, config: Path) -> Path:
    """A path that leads to a config.json; of a declared model, which commands say what it holds."""
    name = str(config)
    if os.path.exists(config / "config.json" if os.path.isdir(config) else config):
        return config
    from ..registry.entries import Entries
    from ..registry.errors import UnknownModelError
    from .models import no_config

    heads = Entries.shipped().heads
    names = {each: known for known, head in heads.items() for each in head.names}
    other = f"`layerfuse models` lists the {len(heads)} that need none"
    if name.lower() in names:
        other = f"it is a declared model, which `layerfuse specs {name}` and `layerfuse plan {name}` show"
    elif near := UnknownModelError.of(name, names, heads).begun:
        other = (
            f"did you mean {near}, a declared model, which `layerfuse specs {near}` and `layerfuse plan {near}` show?"
        )
    raise click.BadParameter(f"{no_config(name)}; {other}")


@_command("Read a config.json, and print a models.toml entry for it")
@click.argument("config", type=click.Path(path_type=Path), callback=_config)
@click.option("--name", help="What to call the model in the entry.")
@click.option(
    "--layer",
    metavar="PATH",
    help="Instead: build the model, and say of this layer where each field of its spec was read.",
)
@_files
@_json
def inspect(config: Path, name: str | None, layer: str | None, files: tuple[Path, ...], json: bool) -> None:
    """Read a Hugging Face config.json, or the folder that holds it: which adapter fits and why, which declared model it
    is, and a models.toml entry for it.

    The entry goes to stdout and everything else to stderr, so that it can be redirected into a file. Exits with 1
    where the config does not say enough, or contradicts itself. What is derived is noted, to be checked. Of a model that
    is not declared, transformers' code is asked for what configs leave out (epsilons, sinks, classes), if it is installed, and
    the entry is held to its layers: one that they contradict, or that leaves some unknown, is a draft, printed as comments, and the exit
    code is 1.

    \b
    Example:
      layerfuse inspect checkpoints/my-model > my-model.toml
      layerfuse inspect checkpoints/my-model --layer model.layers.3
    """  # noqa: D205 - click shows the first paragraph as the summary
    if layer is not None and (name or json):
        raise click.UsageError("--layer goes without --name and --json")
    from .inspecting import answer_inspect, answer_layer

    if layer is not None:
        answer_layer(config, layer, files=files)
    else:
        answer_inspect(config, name=name, files=files, json=json)


@_command("Check models.toml files")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=_FILE)
def check(files: tuple[Path, ...]) -> None:
    """Check models.toml files, and print every problem in them as `file: problem @ path`.

    \b
    Example:
      layerfuse check my-models.toml
    """
    from .checking import answer_check

    answer_check(files)


@_command("What is installed, and what that enables")
@_json
def doctor(json: bool) -> None:
    """Show what is installed and what that enables. Imports no engine, and not AITER.

    Exits with 1 where something installed cannot work: PyPI's unrelated `aiter`, a broken plugin, a LAYERFUSE_FUSIONS
    or LAYERFUSE_BACKEND with an unknown name, another LAYERFUSE_* that nothing reads, or a value that cannot be read.

    \b
    Example:
      layerfuse doctor --json
    """
    from .doctoring import answer_doctor

    answer_doctor(json)


@_command("Run the adapter contract on real layers of a model")
@_model
@click.option(
    "--weights",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Instead: hold the entry to the headers of the safetensors files there. Needs no torch.",
)
@_files
@_json
def contract(model: str, weights: Path | None, files: tuple[Path, ...], json: bool) -> None:
    """Run the adapter contract for a declared model, or a config.json or its folder, on the real layers that transformers builds.

    Prints a line for each scenario. Exits with 1 where one fails, and where transformers cannot build the model.

    With --weights it reads names, dtypes and shapes of a checkpoint's tensors, and no data: each linear and norm of each
    layer is there, as wide and as quantised as declared, and none that the entry should name is left over.

    \b
    Examples:
      layerfuse contract glm-4.7-flash
      layerfuse contract deepseek-v3 --weights checkpoints/DeepSeek-V3
    """
    if weights is not None:
        from .weighing import answer_weights

        answer_weights(model, weights, files=files, json=json)
        return
    from .contracting import answer_contract

    answer_contract(model, files=files, json=json)


@_command("The specs of a model's layers on one rank")
@_model
@click.option("--tp", type=click.IntRange(1, 1 << 20), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which of the ranks.")
@click.option("--engine", type=str.lower, metavar="NAME", help="With the epsilons that it builds norms with.")
@click.option("--published", is_flag=True, help="Say how the published checkpoint is quantised, too.")
@click.option("--names", is_flag=True, help="Names for vLLM and transformers instead, as JSON. Needs transformers.")
@_files
@_json
def specs(model: str, tp: int, rank: int, names: bool, **asked: Any) -> None:
    """Print the spec of every layer on one rank. Needs no torch.

    With --names it prints the packed_modules_mapping that vLLM asks of a model, and the keys under which transformers'
    KernelConfig takes a kernel for a norm and the module behind it.

    MODEL is a declared name, or the path of a config.json or of its folder. The JSON is held to specs.schema.json, which
    the package ships: every object says its `type`, and `version` says which schema it is.

    \b
    Example:
      layerfuse specs deepseek-v3 --tp 8 --json
    """
    if rank >= tp:
        raise click.BadParameter(f"ranks are 0 to {tp - 1} at --tp {tp}, got {rank}", param_hint="--rank")
    from .specs import answer_names, answer_specs

    if names:
        answer_names(model, files=asked["files"])
        return
    answer_specs(model, tp=tp, rank=rank, **asked)


@_command("What two plans or two reports say differently")
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@_json
def diff(before: Path, after: Path, json: bool) -> None:
    """Show what is new, gone and changed between two JSON files of `plan --json` or `specs --json`, or two reports: of one kind.

    Exits with 1 where they differ, and where a file holds something else.

    \b
    Example:
      layerfuse diff before.json after.json
    """
    from .diffing import answer_diff

    answer_diff(before, after, json=json)


def _finite(_: click.Context, __: click.Parameter, number: float | None) -> float | None:
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"{number} is no finite number")
    return number


@_command("Find the fusions and sites that move a model's numbers")
@_model
@click.argument("prompts", type=_FILE)
@click.option(
    "--tolerance",
    metavar="X",
    type=click.FloatRange(0),
    callback=_finite,
    help="Allow this much, as a fraction of the largest logit.",
)
@click.option(
    "--report",
    metavar="FILE",
    type=_FILE,
    help="Search what this report says is fused: an engine's, or one of fusion.compile.",
)
@click.option("--greedy", is_flag=True, help="Hold the most likely token at each position instead of the logits.")
@_files
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; the GPU if there is one.")
def bisect(model: str, prompts: Path, **asked: Any) -> None:
    """Find the fusions and sites that move a model's numbers: run it with halves of them switched off.

    MODEL is a declared model or the path of a config.json, of which a small one is built as for verify, or a folder with config.json and
    weights.
    PROMPTS holds token ids, a JSON list on each line. LAYERFUSE_FUSIONS says which fusions take part. With --report it
    is what was fused there, but for what that variable switches off; what the model has no site for is named. Without
    --tolerance, what verify allows for the dtype is allowed. Exits with 1 where something moves a number too far.

    \b
    Example:
      layerfuse bisect checkpoints/my-model prompts.jsonl --greedy
    """
    from .bisecting import answer_bisect

    answer_bisect(model, prompts, **asked)


@_command("Time fusions against their peers, and check every result")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=fusion_names)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_fusions,
    help="List what is measured, and by what the rest is.",
)
@click.option("--model", shell_complete=_names, help="Whose widths to take; by default one that has the fusion.")
@click.option("--widths", metavar="N,N,...", help="Widths of your own instead, in the order of the op's arguments.")
@click.option("--tokens", metavar="N,N,...", help="How many rows; by default 1 to 65536 on a GPU, to 1024 on a CPU.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32.")
@click.option("--group-size", type=int, help="Columns per scale, where groups have one; by default 128.")
@click.option("--column-major", is_flag=True, help="Scales of groups that lie column after column.")
@click.option("--tma-aligned", is_flag=True, help="The same, each column starting on 16 bytes.")
@click.option("--ue8m0", is_flag=True, help="Scales that are powers of two.")
@click.option("--fp8", metavar="NAME", help="e4m3fn or e4m3fnuz; by default that of this GPU.")
@click.option("--heads", type=int, help="Of a gated norm or a query, which are normed one by one.")
@click.option("--kv-heads", type=int, help="Of a key; by default as many as of the query.")
@click.option("--turned", type=int, metavar="N", help="Columns of each head that a rope turns; by default all.")
@click.option("--activation", metavar="NAME", help="Of a gated norm's gate: silu or sigmoid.")
@click.option("--gate-first", is_flag=True, default=None, help="A gated norm's gate comes before its norm.")
@click.option("--limit", type=float, help="What a gated MLP clamps its halves to.")
@click.option("--pad-to", type=int, metavar="N", help="Columns of a padded norm; by default a multiple of 256.")
@click.option("--weight-offset", type=float, help="Added to weights: 1 for zero-centred ones.")
@click.option("--weight-dtype", metavar="NAME", help="bf16, fp16 or fp32; by default that of the rows.")
@click.option("--peers", metavar="A,B,...", help="Only these; `layerfuse` stands for all of our backends.")
@click.option(
    "--aiter",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of ROCm/aiter, for its Triton ops.",
)
@click.option("--quick", is_flag=True, help="Fewer tokens and rounds, and nothing that takes minutes to tune.")
@click.option("--device", metavar="NAME", help="cuda or cpu; by default the GPU if there is one.")
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(2, LARGEST),
    help="Processes; by default one per GPU, two on a CPU.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="For the files; by default here, or bench/results of a checkout.",
)
@_files
@_json
def bench(names: tuple[str, ...], peers: str | None, **options: Any) -> None:
    """Time fusions, by default all, against their peers in one run, and check every result against float64.

    Writes tables, a plot and JSON. Exits with 1 where a result was wrong or a peer failed.

    \b
    Examples:
      layerfuse bench add_rms_norm --peers layerfuse,inductor,copy --tokens 1,64,4096
      layerfuse bench all_reduce_add_rms_norm --ranks 2 --widths 7168
    """
    from .benching import answer_bench

    answer_bench(names, peers=None if peers is None else [name.strip() for name in peers.split(",")], **options)


@_command("Print the script for completion in a shell")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in a shell.

    \b
    Examples:
      eval "$(layerfuse completion bash)"      in ~/.bashrc
      layerfuse completion fish > ~/.config/fish/completions/layerfuse.fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    if script is not None:
        click.echo(script(app, {}, "layerfuse", "_LAYERFUSE_COMPLETE").source())
