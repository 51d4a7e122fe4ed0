"""The heavy engines work on this machine, and compute what plain torch computes; graphs of LangGraph play and
train. Each runs in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = Path(__file__).parent
sys.path.insert(0, str(ENGINES))
from environment import EXTRAS, LackingError, engine_python  # noqa: E402

TIMEOUT_S = 3600 if os.environ.get("TURNWISE_FULL") else 1800
NOT_TRIED = 77  # the exit status of a script for which this machine is too slow
PATHS = (ENGINES, ENGINES.parent / "support", ENGINES.parents[1])
SCRIPTS = [(engine, f"smoke_{engine}.py") for engine in EXTRAS if engine in ("ray", "deepspeed")] + [
    ("vllm", "train_vllm.py")
]
SCRIPTS += [
    ("ray", "contract_ray.py"),
    ("langgraph", "graphs_langgraph.py"),
    ("langgraph", "train_langgraph.py"),
]
SCRIPTS += [("vllm", "transfer_vllm.py")]
SCRIPTS += [("clients", "clients_gateway.py"), ("clients", "frameworks_gateway.py")]
SCRIPTS += [("crewai", "crew_gateway.py")]
FOREIGN_SCRIPTS = [("openenv", "contract_openenv.py"), ("verifiers", "contract_verifiers.py")]
"""Systems of others; each script gets a model that their environments can't make."""
if os.environ.get("TURNWISE_FULL"):
    SCRIPTS += [("deepspeed", "train_deepspeed.py"), ("megatron", "train_megatron.py")]
    SCRIPTS += [("vllm", "contract_vllm.py")]
    SCRIPTS += [("ray", "train_ray.py"), ("ray", "rewards_ray.py")]
    SCRIPTS += [("ray", "faults_ray.py", kind) for kind in ("rank", "sigterm", "raylet", "freeze", "driver")]
    SCRIPTS += [("vllm", "train_ray_vllm.py"), ("ray", "nodes_ray.py"), ("ray", "autoscaler_ray.py")]
    SCRIPTS += [
        ("deepspeed", "train_examples.py", "deepspeed"),
        ("megatron", "train_examples.py", "megatron"),
    ]
    SCRIPTS += [("vllm", "train_vllm_sharded.py", "fsdp2")]
    FED_BY = ["deepspeed", "megatron"]
    UNDER_RAY = ["fsdp2", "deepspeed", "megatron"]
else:
    MEGATRON_RUNS = "(a_run_with and pp2_critic) or that_of_transformers"
    SCRIPTS += [
        ("ray", "faults_ray.py"),
        (
            "deepspeed",
            "train_deepspeed.py",
            "-k",
            "zero3-critic or (zero1-lora and steps) or launcher or (roles_on_other and 3)",
        ),
        ("megatron", "train_megatron.py", "-k", f"(steps and (tp2_pp2 or value_cp2_pp2)) or {MEGATRON_RUNS}"),
        ("deepspeed", "train_examples.py", "deepspeed", "-k", "fewer_devices and 2"),
        ("megatron", "train_examples.py", "megatron", "-k", "(fewer and lake-2) or (fewer and sokoban-4)"),
    ]
    FED_BY = []
    UNDER_RAY = ["deepspeed", "megatron"]


@pytest.mark.parametrize(
    ("engine", "script", "words"), [(engine, script, words) for engine, script, *words in SCRIPTS]
)
def test_agrees_with_plain_torch(engine, script, words):
    try:
        python = engine_python(engine)
    except LackingError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "HF_HUB_OFFLINE": "1"}
    command = [python, ENGINES / script, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if run.returncode == NOT_TRIED:
        pytest.skip(run.stdout)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert f"{engine}" in run.stdout
    print(run.stdout)


@pytest.mark.parametrize("trainer", FED_BY)
def test_vllm_is_fed_by_other_engines(trainer):
    """In the environment of vLLM, with the packages of the engine that trains behind its own."""
    try:
        python = engine_python("vllm")
        packages = packages_of(engine_python(trainer))
    except LackingError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "HF_HUB_OFFLINE": "1"}
    command = [python, ENGINES / "train_vllm_sharded.py", trainer, packages]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    print(run.stdout)


@pytest.mark.parametrize("engine", UNDER_RAY)
def test_sharded_strategies_train_under_ray(request, engine):
    """In the environment of the engine that trains, with Ray's packages behind its own: what DeepSpeed
    compiles is made for this torch."""
    try:
        python = engine_python("ray")
        if engine != "fsdp2":
            behind = packages_of(python)
            python = engine_python(engine)
            added = Path(packages_of(python), "ray.pth")
            added.write_text(behind)
            # Else Ray's packages would stand in for what the engine's own extra lacks.
            request.addfinalizer(added.unlink)
    except LackingError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "HF_HUB_OFFLINE": "1"}
    command = [python, ENGINES / "strategies_ray.py", engine]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    print(run.stdout)


def packages_of(python: str | Path) -> str:
    """The folder of the packages of an environment."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("system", "script"), FOREIGN_SCRIPTS)
def test_talks_to_systems_of_others(system, script, tiny_model):
    try:
        python = engine_python(system)
    except LackingError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    command = [python, ENGINES / script, tiny_model]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    print(run.stdout)
