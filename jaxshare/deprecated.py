"""Names that have changed. The old ones work in version 0.2, with a
DeprecationWarning that says what to write instead.

`MODULES` maps the modules that have moved, `NAMES` the classes and functions that are called
differently now. Nothing else in the package uses either.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MODULES: Mapping[str, str | tuple[str, ...]] = {
    "jaxshare.attention_xla": "jaxshare.attention.xla",
    "jaxshare.automaton": "jaxshare.decoding.automaton",
    "jaxshare.cache_folder": "jaxshare.paths",
    "jaxshare.contents": "jaxshare.cache_io",
    "jaxshare.decode": (
        "jaxshare.decoding.loop",
        "jaxshare.decoding.state",
        "jaxshare.decoding.finish_reason",
    ),
    "jaxshare.environment": "jaxshare.models.tokenizer_files",
    "jaxshare.files": "jaxshare.paths",
    "jaxshare.groups": "jaxshare.data_parallel",
    "jaxshare.kept": "jaxshare.decoding.top_logits",
    "jaxshare.mass": "jaxshare.attention.block_share",
    "jaxshare.merge": "jaxshare.attention.merge",
    "jaxshare.models.checkpoint": "jaxshare.models.orbax_io",
    "jaxshare.models.fields": "jaxshare.models.config_fields",
    "jaxshare.models.forms": "jaxshare.serving.evaluation.arithmetic_forms",
    "jaxshare.models.generation": "jaxshare.models.generation_config",
    "jaxshare.models.hf": (
        "jaxshare.models.safetensors_files",
        "jaxshare.models.safetensors_io",
        "jaxshare.models.tensor_names",
    ),
    "jaxshare.models.problems": "jaxshare.serving.evaluation.arithmetic",
    "jaxshare.models.reads": "jaxshare.models.orbax_reading",
    "jaxshare.models.rope_fields": "jaxshare.models.rope_config",
    "jaxshare.models.sharded": ("jaxshare.models.tensor_parallel", "jaxshare.arena"),
    "jaxshare.plan": ("jaxshare.attention.plan", "jaxshare.attention.tiling"),
    "jaxshare.recording": "jaxshare.trace.recorder",
    "jaxshare.reencoding": "jaxshare.trace.attention",
    "jaxshare.reference": "jaxshare.attention.reference",
    "jaxshare.sampling": "jaxshare.decoding.samplers",
    "jaxshare.serving.agents.asking": "jaxshare.serving.agents.model_calls",
    "jaxshare.serving.agents.calls": "jaxshare.serving.agents.requests",
    "jaxshare.serving.agents.command": ("jaxshare.serving.cli.agents", "jaxshare.serving.cli.main"),
    "jaxshare.serving.agents.emitting": "jaxshare.serving.agents.compiler.instructions",
    "jaxshare.serving.agents.exchange": "jaxshare.serving.agents.messages",
    "jaxshare.serving.agents.expressions": "jaxshare.serving.agents.compiler.expressions",
    "jaxshare.serving.agents.frames": (
        "jaxshare.serving.agents.compiler.frames",
        "jaxshare.serving.agents.compiler.duplicates",
    ),
    "jaxshare.serving.agents.graph": "jaxshare.serving.agents.compiler.flow_graph",
    "jaxshare.serving.agents.lowering": "jaxshare.serving.agents.compiler.statements",
    "jaxshare.serving.agents.models": "jaxshare.serving.agents.backends",
    "jaxshare.serving.agents.names": "jaxshare.serving.agents.compiler.variables",
    "jaxshare.serving.agents.program": "jaxshare.serving.agents.compiler.program",
    "jaxshare.serving.agents.trace": "jaxshare.serving.agents.search_log",
    "jaxshare.serving.answers": "jaxshare.serving.workers.text.answers",
    "jaxshare.serving.arena": (
        "jaxshare.serving.branches.peak_use",
        "jaxshare.serving.kvcache.pool",
    ),
    "jaxshare.serving.baselines": (
        "jaxshare.serving.evaluation.baselines",
        "jaxshare.serving.evaluation.skeleton",
    ),
    "jaxshare.serving.batch": ("jaxshare.serving.cli.batch", "jaxshare.serving.cli.arguments"),
    "jaxshare.serving.batch_input": "jaxshare.serving.branches.batch_input",
    "jaxshare.serving.calibration": (
        "jaxshare.serving.tuning.calibration",
        "jaxshare.serving.kvcache.sharing_cost",
    ),
    "jaxshare.serving.capacities": "jaxshare.serving.workers.block_sizes",
    "jaxshare.serving.contribution": (
        "jaxshare.serving.kvcache.contribution",
        "jaxshare.serving.kvcache.contribution_formulas",
    ),
    "jaxshare.serving.costs": "jaxshare.serving.kvcache.sharing_cost",
    "jaxshare.serving.demo": ("jaxshare.serving.cli.demo", "jaxshare.serving.cli.display"),
    "jaxshare.serving.devices": "jaxshare.serving.cluster.process_mesh",
    "jaxshare.serving.display": "jaxshare.serving.cli.display",
    "jaxshare.serving.endings": "jaxshare.serving.workers.text.step_automata",
    "jaxshare.serving.engine.calls": (
        "jaxshare.serving.engine.request",
        "jaxshare.serving.errors",
        "jaxshare.serving.engine.stream",
        "jaxshare.serving.engine.completion",
        "jaxshare.decoding.state",
    ),
    "jaxshare.serving.engine.guesses": "jaxshare.serving.engine.speculation",
    "jaxshare.serving.engine.guests": "jaxshare.serving.kvcache.lease",
    "jaxshare.serving.engine.loop": (
        "jaxshare.serving.engine.scheduler",
        "jaxshare.serving.engine.running_request",
    ),
    "jaxshare.serving.engine.memory": "jaxshare.serving.kvcache.manager",
    "jaxshare.serving.engine.pool": "jaxshare.serving.kvcache.pool",
    "jaxshare.serving.engine.queue": "jaxshare.serving.engine.fair_queue",
    "jaxshare.serving.engine.replies": "jaxshare.serving.engine.output",
    "jaxshare.serving.engine.saved": "jaxshare.serving.kvcache.checkpoint",
    "jaxshare.serving.engine.tree": "jaxshare.serving.kvcache.prefix_tree",
    "jaxshare.serving.evaluation.mathematics": "jaxshare.serving.evaluation.checkers.mathematics",
    "jaxshare.serving.evaluation.mathematics_process": "jaxshare.serving.evaluation.checkers.mathematics_process",
    "jaxshare.serving.evaluation.sandbox": "jaxshare.serving.evaluation.checkers.sandbox",
    "jaxshare.serving.evaluation.sandbox_process": "jaxshare.serving.evaluation.checkers.sandbox_process",
    "jaxshare.serving.evaluation.command": "jaxshare.serving.cli.evaluation.evaluate",
    "jaxshare.serving.evaluation.judge_command": "jaxshare.serving.cli.evaluation.judge",
    "jaxshare.serving.fleet": "jaxshare.serving.cluster.ray_pool",
    "jaxshare.serving.folding": "jaxshare.serving.branches.sharing_plan",
    "jaxshare.serving.formats": "jaxshare.serving.workers.prompts.presets",
    "jaxshare.serving.growth": "jaxshare.serving.workers.growth",
    "jaxshare.serving.holes": "jaxshare.serving.kvcache.free_list",
    "jaxshare.serving.hotspot": "jaxshare.serving.logits_cache.hotspot",
    "jaxshare.serving.inspection": (
        "jaxshare.serving.workers.inspection.probe",
        "jaxshare.serving.workers.prompts.presets",
        "jaxshare.serving.workers.inspection.plots",
        "jaxshare.serving.workers.prompts.preview",
    ),
    "jaxshare.serving.layouts": "jaxshare.serving.workers.layouts",
    "jaxshare.serving.nodes": "jaxshare.serving.cluster.model_spec",
    "jaxshare.serving.party": "jaxshare.serving.workers.roster",
    "jaxshare.serving.prefill": "jaxshare.serving.engine.prefill",
    "jaxshare.serving.prefixes": "jaxshare.serving.branches.prefix",
    "jaxshare.serving.prompt_texts": "jaxshare.serving.workers.prompts.texts",
    "jaxshare.serving.prompt_view": "jaxshare.serving.workers.prompts.preview",
    "jaxshare.serving.prompts": "jaxshare.serving.workers.prompts.format",
    "jaxshare.serving.records": "jaxshare.serving.jsonl",
    "jaxshare.serving.replay": "jaxshare.serving.logits_cache.replay",
    "jaxshare.serving.replicas": "jaxshare.serving.branches.data_parallel",
    "jaxshare.serving.residency": (
        "jaxshare.serving.kvcache.policy",
        "jaxshare.serving.kvcache.eviction",
        "jaxshare.serving.kvcache.contribution",
    ),
    "jaxshare.serving.results": "jaxshare.serving.workers.results",
    "jaxshare.serving.room": "jaxshare.serving.branches.row_budget",
    "jaxshare.serving.saved_sessions": "jaxshare.serving.workers.checkpoint",
    "jaxshare.serving.saves": "jaxshare.serving.checkpoints",
    "jaxshare.serving.selection": "jaxshare.serving.branches.selection",
    "jaxshare.serving.session_texts": "jaxshare.serving.workers.prompts.session_prompt",
    "jaxshare.serving.shards": "jaxshare.serving.cluster.shards",
    "jaxshare.serving.steps": (
        "jaxshare.serving.workers.text.step_automata",
        "jaxshare.serving.workers.text.codec",
    ),
    "jaxshare.serving.transcript": (
        "jaxshare.serving.workers.text.transcript",
        "jaxshare.serving.workers.text.codec",
    ),
    "jaxshare.serving.trees": "jaxshare.serving.branches.prompt_tree",
    "jaxshare.serving.tune_command": "jaxshare.serving.cli.tune",
    "jaxshare.serving.waves": "jaxshare.serving.branches.peak_use",
    "jaxshare.sizes": "jaxshare.layout",
    "jaxshare.steps": ("jaxshare.decoding.steps", "jaxshare.decoding.step_ends"),
    "jaxshare.work": "jaxshare.pallas.work_items",
}
"""Old modules, and where what they held is now."""

NAMES: Mapping[str, str] = {
    "jaxshare.serving.inspection.attention_mass": "attention_shares",
    "jaxshare.serving.inspection.mass_picture": "attention_picture",
    "jaxshare.models.forms.draw_form": "sample_form",
    "jaxshare.serving.engine.calls.Text": "Detokenizer",
    "jaxshare.serving.saved_sessions.SessionFacts": "SessionMetadata",
    "jaxshare.serving.folding.fold": "build_prefix_tree",
    "jaxshare.decode.Model": "DecodeModel",
    "jaxshare.decode.Reason": "FinishReason",
    "jaxshare.kept.Kept": "TopLogits",
    "jaxshare.kept.keep": "compress_logits",
    "jaxshare.mass.block_mass": "block_attention_share",
    "jaxshare.models.problems.Problem": "SumsProblem",
    "jaxshare.recording.Record": "PassLog",
    "jaxshare.serving.agents.calls.Next": "ChildNext",
    "jaxshare.serving.agents.calls.Result": "ChildResult",
    "jaxshare.serving.agents.emitting.Loop": "LoopLabels",
    "jaxshare.serving.agents.graph.Node": "FlowNode",
    "jaxshare.serving.agents.trace.Trace": "SearchLog",
    "jaxshare.serving.agents.trace.TracedRun": "LoggedRun",
    "jaxshare.serving.agents.trace.TracedState": "LoggedState",
    "jaxshare.serving.calibration.Point": "Timing",
    "jaxshare.serving.calibration.load": "load_costs",
    "jaxshare.serving.calibration.save": "save_costs",
    "jaxshare.serving.costs.Device": "DeviceCosts",
    "jaxshare.serving.costs.Shape": "AttentionShape",
    "jaxshare.serving.engine.calls.Call": "Request",
    "jaxshare.serving.engine.calls.End": "FinishReason",
    "jaxshare.serving.engine.calls.Piece": "TokenChunk",
    "jaxshare.serving.engine.guesses.Guesses": "DraftLookup",
    "jaxshare.serving.engine.guesses.confirm": "verify",
    "jaxshare.serving.engine.guests.Guest": "KVLease",
    "jaxshare.serving.engine.guests.Guests": "LeaseTable",
    "jaxshare.serving.engine.loop.Loop": "Scheduler",
    "jaxshare.serving.engine.loop.Row": "RunningRequest",
    "jaxshare.serving.engine.memory.Memory": "KVManager",
    "jaxshare.serving.engine.queue.Queue": "FairQueue",
    "jaxshare.serving.engine.replies.Replies": "OutputProcessor",
    "jaxshare.serving.fleet.Fleet": "RayPool",
    "jaxshare.serving.fleet.Result": "JobResult",
    "jaxshare.serving.folding.Arrangement": "SharingPlan",
    "jaxshare.serving.folding.Node": "PrefixNode",
    "jaxshare.serving.folding.SharedBlock": "SharedPrefix",
    "jaxshare.serving.folding.Stream": "Sample",
    "jaxshare.serving.folding.arrange": "plan_sharing",
    "jaxshare.serving.holes.Holes": "FreeList",
    "jaxshare.serving.inspection.Extent": "BlockExtent",
    "jaxshare.serving.inspection.Mass": "AttentionShare",
    "jaxshare.serving.inspection.Recorder": "AttentionProbe",
    "jaxshare.serving.nodes.NodeModel": "ModelSpec",
    "jaxshare.serving.party.Party": "Roster",
    "jaxshare.serving.residency.digest": "prefix_hash",
    "jaxshare.serving.room.Room": "RowBudget",
    "jaxshare.serving.saves.Saved": "SavedCheckpoint",
    "jaxshare.serving.saves.Saves": "CheckpointStore",
    "jaxshare.serving.saves.has_saves": "has_checkpoints",
    "jaxshare.serving.transcript.Voice": "WorkerCursor",
    "jaxshare.steps.Outcome": "StepOutcome",
}
"""Old names by old module, and what they are called in the new one."""

GONE_IN = "0.3"


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns the caller of the caller that a name has changed."""
    warnings.warn(
        f"{old} is now {new}; the old name goes away in version {GONE_IN}",
        DeprecationWarning,
        stacklevel,
    )


def renamed_arguments[**P, R](**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function whose keyword arguments had other names.

    Args:
      names: what each old name is now.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs:
                warn_renamed(old, names[old])
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def find(path: str) -> Any:
    """The class or function at a dotted path, such as "jaxshare.cache.KVCache"."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def renamed(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package that exported other names.

    Args:
      package: the package's name.
      names: the dotted path of what each old name is now.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn_renamed(f"{package}.{name}", names[name])
        return find(names[name])

    return __getattr__


class _MovedModule(types.ModuleType):
    """An old module: its names are looked up where they are now."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for module in map(importlib.import_module, _new_modules(self.__name__)):
                new = NAMES.get(f"{self.__name__}.{name}", name)
                if hasattr(module, new):
                    return getattr(module, new)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Importing `jaxshare.decode` puts the module where the function of that name was."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _MovedLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MovedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        warn_renamed(module.__name__, " and ".join(_new_modules(module.__name__)))


class _MovedFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
        /,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, _MovedLoader())


def _new_modules(old: str) -> tuple[str, ...]:
    new = MODULES[old]
    return (new,) if isinstance(new, str) else new


def find_moved_modules() -> None:
    """Makes the old modules importable. The finder is the last one: it costs other imports
    nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
