"""Packages of environments are imported at their first use. If one is missing, the error names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turnwise.envs.packages import needs
from turnwise.errors import install_hint

PACKAGES = {
    "gymnasium": ("gymnasium", {"id": "Taxi-v4"}, "gym"),
    "textarena": ("textarena", {"id": "GuessTheNumber-v0"}, "textarena"),
    "reasoning_gym": ("reasoning_gym", {"dataset": "chain_sum"}, "reasoning-gym"),
}


def test_the_extra_is_named_where_a_package_is_missing() -> None:
    code = f"""
import sys
from turnwise.envs.registry import env_class, make_env, takes_split
from turnwise.errors import NotAvailableError
for env_type, (package, env_config, extra) in {PACKAGES!r}.items():
    assert takes_split(env_type) and package not in sys.modules, env_type
    sys.modules[package] = None
    try:
        make_env(env_type, env_config, "train")
    except NotAvailableError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    told = run.stdout.splitlines()
    assert [line.partition(": ")[2] for line in told] == [
        install_hint(extra) for _, _, extra in PACKAGES.values()
    ]


def test_what_a_package_itself_lacks_is_not_blamed_on_it() -> None:
    with pytest.raises(ModuleNotFoundError, match="another"), needs("gymnasium", "gym"):
        raise ModuleNotFoundError("No module named 'another'", name="another")
