"""The rules of the house (`docs/design/rooms.md`), read off the source. Exception lists here may only
shrink."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from turnwise.spec import ESTIMATORS, PG_VARIANTS, STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "turnwise"

LAYERS: list[set[str]] = [
    {"errors", "spec", "types", "costs", "model_files", "runtime", "transfer", "protocols"},
    {"config", "algorithms", "chat", "data", "models", "batching"},
    {"envs", "tools", "gateway"},
    {"agents", "inference", "training"},
    {"rollout", "published"},
    {"examine"},
    {"lifecycle"},
    {"pipelines"},
    {"assemble"},
    {"play"},
    {"trainer"},
    {"rl_tool"},
    {"cli"},
]
"""A room imports lower layers only, and never a neighbour in its own."""

SIDE_ROOMS = {"cluster", "tracking", "report"}
"""Beside the layers: the rooms of `READS_CONFIG` alone import them."""

ONLY: dict[str, set[str]] = {
    "__init__": {"rl_tool", "trainer"},
    "__main__": {"cli"},
    "errors": set(),
    "costs": set(),
    "spec": {"errors"},
    "types": {"errors", "spec"},
    "model_files": {"errors"},
    "runtime": {"errors", "model_files"},
    "transfer": {"errors", "runtime", "types"},
    "protocols": {"runtime", "transfer", "types"},
    "config": {"costs", "errors", "model_files", "runtime", "spec"},
    **dict.fromkeys(SIDE_ROOMS, LAYERS[0]),
    "testing": LAYERS[0] | LAYERS[1] | LAYERS[2],
}
"""Rooms that may import less than the layers below them: these and nothing else."""

NEVER: dict[str, set[str]] = {"training": {"algorithms"}, "rollout": {"agents", "inference"}}
"""Lower rooms that a room may not import: it is handed a loss, or protocols, instead."""

READS_CONFIG = {"examine", "lifecycle", "pipelines", "assemble", "play", "cli", "rl_tool", "trainer"}
"""Every other room is told its real parameters."""

HEAVY: dict[str, str | tuple[str, ...]] = {
    "ray": "cluster/ray_",
    "vllm": "inference/",
    "sglang": "inference/",
    **{spec.extra: "training/" for spec in STRATEGIES.values() if spec.extra and spec.kind != "sampling"},
    "mlflow": "tracking/mlflow_",
    "swanlab": "tracking/swanlab_store.py",
    "wandb": "tracking/wandb_store.py",
    "tensorboard": "tracking/tensorboard.py",
    "peft": "models/lora.py",
    "gguf": "models/gguf_model.py",
    "langgraph": "agents/",
    "langchain": "agents/",
    "langchain_core": "agents/",
    "datasets": "data/tables.py",
    "pyarrow": "data/tables.py",
    "gymnasium": "envs/",
    "minigrid": "envs/",
    "pygame": "envs/gymnasium/make.py",
    "textarena": "envs/textarena_env.py",
    "aiohttp": ("gateway/", "envs/openenv/"),
    "reasoning_gym": "envs/reasoning_gym_env.py",
    "bm25s": "data/word_index.py",
    "rapidfuzz": "envs/webshop/reward.py",
    "mcp": "tools/mcp_server.py",
    "skyrl_gym": "tools/skyrl_gym.py",
    "math_verify": "data/math_verify_process.py",
}
"""Optional libraries and the one module or folder that imports each."""

CALLS_C = {"cli/guard.py", "runtime/threads.py", "runtime/time_limit.py", "tools/jail.py"}
"""Files that call the C library or Python's own C. Our own C is called from `models/cpu` alone."""

BROAD_EXCEPT = {
    "agents/gateway_agent.py",
    "cluster/actor_host.py",
    "cluster/beats.py",
    "cluster/channel.py",
    "cluster/child.py",
    "cluster/env_child.py",
    "cluster/env_pool.py",
    "cluster/env_worker.py",
    "cluster/fork_server.py",
    "cluster/messages.py",
    "cluster/process.py",
    "cluster/ray_session.py",
    "cluster/server_child.py",
    "data/reward_calls.py",
    "data/math_verify_process.py",
    "runtime/entry_points.py",
    "model_files/hub.py",
    "gateway/server.py",
    "inference/embedded/server.py",
    "inference/restarts.py",
    "inference/server_manager.py",
    "inference/vllm_server.py",
    "models/load.py",
    "models/token_decoder.py",
    "assemble/cluster.py",
    "pipelines/parity.py",
    "rollout/group_filter.py",
    "tools/jail.py",
    "rollout/player.py",
    "runtime/threads.py",
    "tracking/terminal.py",
}
"""The boundaries where `except Exception` stands: foreign code runs below them, and its failure is
recorded."""

_NO_TORCH = "refuses what is wrong before it imports torch"
LATE_IMPORTS = {
    "assemble/ray.py": "ray is an extra, and most runs don't use it",
    "__init__.py": "`import turnwise` is fast",
    "agents/react_agent.py": "LangGraph is an extra, and most runs don't use it",
    "assemble/prepare.py": "`turnwise config` imports torch only if a run is continued",
    "cli/check_env_command.py": "needs no torch, but with --tokenizer",
    "cli/main.py": "the process that waits for the command imports no numpy",
    **dict.fromkeys(
        (f"cli/{name}_command.py" for name in ("demos", "eval", "play", "rollout", "serve", "train")),
        _NO_TORCH,
    ),
    "cli/model_commands.py": _NO_TORCH,
    "cli/verbs.py": "`turnwise --help` imports no command",
    "envs/gymnasium/env.py": "gymnasium, an extra; a missing one gives an error that names it",
    "examine/examined.py": "`turnwise config` imports no torch",
    "examine/problems.py": "`turnwise config` imports torch only for a user's own loss or a reward model",
    "published/__init__.py": "LangChain is an extra, and most loops don't use it",
    "play/screen.py": "imports no torch, which the setup of an episode does",
    "rl_tool/evaluation.py": _NO_TORCH,
    "rl_tool/tool.py": _NO_TORCH,
    "rl_tool/training.py": _NO_TORCH,
    "trainer/trainer.py": "refuses a wrong config before it imports torch, and notebooks import it fast",
}
"""Files that import modules of ours inside functions or for the type checker alone, and what they keep
out."""

MODULES_WITHOUT_TWINS = {"roles.py", "rows.py", "session.py", "scheduler.py", "replay.py"}
"""Names of files that say too little to stand twice."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FRONT_DOOR_LINES = 400, 60, 220


@cache
def texts() -> dict[str, str]:
    """Path below the package → what stands there."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def sources() -> dict[str, list[ast.AST]]:
    """Path below the package → every node of its syntax tree."""
    return {path: list(ast.walk(ast.parse(text))) for path, text in texts().items()}


@pytest.fixture(autouse=True, scope="module")
def trees_are_let_go() -> Iterator[None]:
    """Each full garbage collection of later tests would go through some million nodes."""
    yield
    sources.cache_clear()


def lines() -> Iterator[tuple[str, int, str]]:
    for path, text in texts().items():
        yield from ((path, number, line) for number, line in enumerate(text.splitlines(), 1))


def room_of(path: str) -> str:
    """The room of a file: its folder below the package, or the module's own name in the first layer."""
    first, _, rest = path.partition("/")
    return first if rest else first.removesuffix(".py")


def imported(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """`(line, dotted module)` of every import, wherever it stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names = [f"turnwise.{alias.name}" for alias in node.names] if prefix == "turnwise" else [prefix]
            yield from ((node.lineno, name) for name in names)


def allowed(room: str) -> set[str]:
    """The rooms that a room may import, besides itself."""
    if room in ONLY:
        return ONLY[room]
    depth = next((i for i, layer in enumerate(LAYERS) if room in layer), None)
    assert depth is not None, f"turnwise/{room} is a room that this test doesn't know"
    below = set().union(*LAYERS[:depth]) - NEVER.get(room, set())
    return below | SIDE_ROOMS if room in READS_CONFIG else below - {"config"}


def calls(nodes: list[ast.AST], names: set[str]) -> Iterator[ast.Call]:
    """Calls of builtins by name; methods of the same name are something else."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_imports_go_one_way():
    problems = []
    for path, nodes in sources().items():
        room = room_of(path)
        for line, module in imported(nodes):
            if module.startswith("."):
                problems.append(f"turnwise/{path}:{line} imports relatively; write the full name")
            if module.split(".")[0] != "turnwise" or module == "turnwise.__version__":
                continue
            target = [*module.split("."), ""][1]
            if target != room and target not in allowed(room):
                problems.append(f"turnwise/{path}:{line} imports {module}, which {room} may not")
    report(problems)


def module_of(path: str) -> str:
    """The dotted name of a file of the package."""
    return ".".join(["turnwise", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and under TYPE_CHECKING count: who reads one file of a circle has to read them
    all."""
    modules = {module_of(path) for path in sources()}
    imports: dict[str, set[str]] = {}
    for path, nodes in sources().items():
        targets = {module for _, module in imported(nodes)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
        imports[module_of(path)] = (targets & modules) - {module_of(path)}
    # Files that import no file that is left can be in no circle; what remains are circles and what leads to
    # them.
    while leaves := [module for module, targets in imports.items() if not targets & imports.keys()]:
        for module in leaves:
            del imports[module]
    while tops := [
        module for module in imports if not any(module in targets for targets in imports.values())
    ]:
        for module in tops:
            del imports[module]
    report(
        [
            f"{module} is in a circle: it imports {', '.join(sorted(t & imports.keys()))}"
            for module, t in imports.items()
        ]
    )


def test_a_heavy_library_is_imported_in_one_place():
    report(
        [
            f"turnwise/{path}:{line} imports {module}; only {place} may"
            for path, nodes in sources().items()
            for line, module in imported(nodes)
            if not path.startswith(place := HEAVY.get(module.split(".")[0], ""))
        ]
    )


def late_imports(nodes: list[ast.AST]) -> list[int]:
    """The lines of the imports of our own modules that don't stand at the top of their file."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        and node.col_offset
        and any(module.split(".")[0] == "turnwise" for _, module in imported([node]))
    ]


def test_own_modules_are_imported_at_the_top():
    late = {path: numbers for path, nodes in sources().items() if (numbers := late_imports(nodes))}
    report(
        [
            f"turnwise/{path}:{number} imports a module of ours that isn't at the top of the file"
            for path, numbers in late.items()
            if path not in LATE_IMPORTS
            for number in numbers
        ]
    )
    report([f"{path} has no late import: take it off LATE_IMPORTS" for path in LATE_IMPORTS.keys() - late])


def test_names_of_files_that_say_little_stand_once():
    names = Counter(path.rpartition("/")[2] for path in texts())
    report([f"{name} stands {names[name]} times" for name in MODULES_WITHOUT_TWINS if names[name] > 1])


def test_our_own_c_is_called_from_one_folder():
    callers = {
        path for path, nodes in sources().items() if any(module == "ctypes" for _, module in imported(nodes))
    }
    assert {path for path in callers if not path.startswith("models/cpu/")} == CALLS_C


def test_light_modules_import_nothing_heavy():
    heavy = {"torch", "transformers", "gymnasium", "matplotlib", *HEAVY}
    code = (
        f"import sys, turnwise.spec, turnwise.protocols, turnwise.config; print(*sorted({heavy!r} & "
        "set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_files_are_short():
    long = [path for path, text in texts().items() if len(text.splitlines()) > MAX_FILE_LINES]
    report([f"turnwise/{path} has more than {MAX_FILE_LINES} lines" for path in long])


def test_functions_are_short():
    long = [
        f"{path}:{node.name}"
        for path, nodes in sources().items()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    report([f"turnwise/{name} has more than {MAX_FUNCTION_LINES} lines" for name in long])


def test_the_front_door_is_one_screen():
    assert len(texts()["pipelines/agentic.py"].splitlines()) <= MAX_FRONT_DOOR_LINES


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in caught
    )


def test_broad_excepts_stand_at_the_boundaries_only():
    handlers = [
        (path, node.lineno)
        for path, nodes in sources().items()
        for node in nodes
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    report(
        [f"turnwise/{path}:{line} catches everything" for path, line in handlers if path not in BROAD_EXCEPT]
    )
    unused = BROAD_EXCEPT - {path for path, _ in handlers}
    report(
        [
            f"{path} catches nothing broadly: take it off BROAD_EXCEPT"
            for path in sorted(unused)
            if path in sources()
        ]
    )


def test_attributes_are_named_not_looked_up():
    report(
        [
            f"turnwise/{path}:{call.lineno} calls {ast.unparse(call)}; state what the object has instead"
            for path, nodes in sources().items()
            for call in calls(nodes, {"getattr", "hasattr"})
            if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        ]
    )


def test_no_text_is_evaluated():
    report(
        [
            f"turnwise/{path}:{call.lineno}"
            for path, nodes in sources().items()
            for call in calls(nodes, {"eval", "exec"})
        ]
    )


def test_no_function_writes_a_global():
    report(
        [
            f"turnwise/{path}:{node.lineno} global {', '.join(node.names)}"
            for path, nodes in sources().items()
            for node in nodes
            if isinstance(node, ast.Global)
        ]
    )


def test_no_drawer_for_everything():
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py"}
    folders = [PACKAGE, ROOT / "tests", ROOT / "examples", ROOT / "benchmarks"]
    report(
        [
            str(path.relative_to(ROOT))
            for folder in folders
            for path in folder.rglob("*.py")
            if path.name in names
        ]
    )


def test_no_work_is_left_in_comments():
    note = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
    report(
        [f"turnwise/{path}:{number} {line.strip()}" for path, number, line in lines() if note.search(line)]
    )


def test_training_is_blind_to_the_algorithm():
    names = re.compile(rf"\b({'|'.join({*ESTIMATORS, *PG_VARIANTS})})\b", re.IGNORECASE)
    report(
        [
            f"turnwise/{path}:{number} says {found.group()!r}"
            for path, number, line in lines()
            if room_of(path) == "training" and (found := names.search(line))
        ]
    )


def test_asynchrony_is_the_bound_of_a_buffer():
    """What else follows from it (a process of its own for the trainer, streamed steps) is derived in
    `config`."""
    asking = {
        f"turnwise/{path}"
        for path, text in texts().items()
        if "config.async_generation_ratio" in text and room_of(path) != "config"
    }
    assert asking == {"turnwise/assemble/source.py"}
