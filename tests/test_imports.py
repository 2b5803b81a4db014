"""Who may import whom: the layers of the design, read from the source, and what an import costs.

Imports point upward only, so there is no cycle that an import inside a function would have to hide.
"""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from .sources import ROOT, Import, imports, modules

# A module imports from earlier layers and, where no cycle comes of it, from its own.
LAYERS = [
    ["errors", "address", "options"],
    ["device*"],
    [
        "entries",
        "window",
        "ordering",
        "payload*",
        "packing*",
        "stats",
        "loops",
        "copier",
        "runtime",
    ],
    ["handles*", "transport*"],
    ["rendezvous*"],
    ["scheduler*", "bulk", "connect", "presence"],
    ["session"],
    ["group"],
    ["collective"],
    ["comm"],
    ["portal", "blocking", "launch", "worker*", "channel", "testing", "shared"],
    [""],
    ["demo*"],  # a user of the public names
    ["cli", "__main__"],
]
# The one leaf of the transports that handles know, and what it may know itself.
BRIDGE = "transport.completion"
RAY = {"worker_launch", "channel.actor", "handles.channel"}
RAY |= {f"rendezvous.ray{part}" for part in ("", "_actor", "_client", "_nccl", "_nccl_store")}
DEMO = {"rich", "typer", "safetensors"}
DEMO_MODULES = ["cli", "__main__", "demo*"]
FOREIGN = {"torch", "anyio", "uvloop"}

MODULES = {name.removeprefix("aiocomm").removeprefix("."): path for name, path in modules().items()}


def own(found: Import) -> str | None:
    """The name inside the package, None for a foreign module."""
    head, _, rest = found.name.partition(".")
    return rest if head == "aiocomm" else None


def layer(name: str) -> int:
    for number, patterns in enumerate(LAYERS):
        if any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for pattern in patterns):
            return number
    raise AssertionError(f"aiocomm.{name} is in no layer: give it one in tests/test_imports.py")


def imports_of(name: str) -> list[Import]:
    return imports(f"aiocomm.{name}" if name else "aiocomm", MODULES[name])


each_module = pytest.mark.parametrize("name", sorted(MODULES))


def test_every_layer_is_told_apart() -> None:
    assert layer("errors") < layer("ordering") < layer("handles.base") < layer("rendezvous.tcp")
    assert layer("handles") == layer("transport.gloo") < layer("scheduler.send") < layer("")


@each_module
def test_imports_point_upward(name: str) -> None:
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports_of(name)
        if (target := own(found)) is not None and target in MODULES and layer(target) > layer(name)
    ]
    assert wrong == []


@each_module
def test_imports_of_the_project_are_real_modules(name: str) -> None:
    targets = {target for found in imports_of(name) if (target := own(found)) is not None}
    assert targets <= set(MODULES)


def test_no_cycle() -> None:
    graph = {
        name: {
            target
            for found in imports_of(name)
            if not found.for_types and (target := own(found)) is not None and target != name
        }
        for name in MODULES
    }
    while graph:  # take away what depends on nothing that is left
        free = {name for name, targets in graph.items() if not targets & graph.keys()}
        assert free, f"a cycle among {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in free}


@each_module
def test_no_import_inside_a_function_hides_a_cycle(name: str) -> None:
    hidden = [
        f"line {found.line}: {found.name}"
        for found in imports_of(name)
        if found.in_function and own(found) is not None
    ]
    # The command line loads only what the command at hand needs; it is the last layer.
    assert hidden == [] or layer(name) == layer("cli")


def test_order_knows_neither_loop_nor_tensor() -> None:
    reached, todo = set(), ["ordering"]
    while todo:
        name = todo.pop()
        for found in imports_of(name):
            target = own(found)
            if target is None:
                reached.add(found.name.partition(".")[0])
            elif target in MODULES:
                todo.append(target)
    assert reached <= set(sys.stdlib_module_names)
    assert not reached & {"asyncio", "torch", "anyio", "socket", "threading"}


@each_module
def test_handles_and_transports_do_not_know_one_another(name: str) -> None:
    targets = {target for found in imports_of(name) if (target := own(found)) is not None}
    if fnmatch(name, "handles*"):
        assert not {target for target in targets if fnmatch(target, "transport*")} - {BRIDGE}
    elif name == BRIDGE:
        assert targets <= {"errors", "device.base"}
    elif fnmatch(name, "transport*"):
        assert not {target for target in targets if fnmatch(target, "handles*")}


@each_module
def test_only_the_named_files_know_foreign_packages(name: str) -> None:
    foreign = {found.name.partition(".")[0] for found in imports_of(name) if own(found) is None}
    foreign -= set(sys.stdlib_module_names)
    allowed = set(FOREIGN)
    if name in RAY:
        allowed.add("ray")
    if name == "rendezvous.ray_nccl_backend":
        allowed.add("cupy")
    if any(fnmatch(name, pattern) for pattern in DEMO_MODULES):
        allowed |= DEMO
    assert foreign <= allowed


@each_module
def test_optional_packages_are_not_needed_to_import(name: str) -> None:
    at_once = {
        found.name.partition(".")[0]
        for found in imports_of(name)
        if not (found.in_function or found.for_types)
    }
    assert "uvloop" not in at_once  # it does not install everywhere


def test_one_file_makes_futures_of_works() -> None:
    assert [name for name, path in MODULES.items() if ".get_future(" in path.read_text()] == [
        BRIDGE
    ]


def test_one_file_knows_cuda() -> None:
    knowing = [name for name, path in MODULES.items() if "torch.cuda" in path.read_text()]
    assert [name for name in knowing if name != "device.base"] == ["device.cuda"]
    assert "torch.cuda" not in "".join(
        line for line in MODULES["device.base"].read_text().partition('"""\n\nfrom')[2]
    )


PROBE = """
import json, sys, time
first = time.process_time()
import torch, torch.distributed, asyncio, multiprocessing, multiprocessing.connection
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
before = set(sys.modules)
second = time.process_time()
import aiocomm
ratio = (time.process_time() - second) / (second - first)
print(json.dumps([ratio, sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, list[str]]]:
    """Processor time of ``import aiocomm``, in that of torch before it, and its new modules.

    The first run compiles; the others find the byte code that an installed package has, whether or
    not this environment lets one be written beside the source.
    """
    byte_code = str(tmp_path_factory.mktemp("byte_code"))
    found = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, byte_code],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        found.append(tuple(json.loads(done.stdout)))
    return found


def test_importing_aiocomm_pulls_in_no_optional_package(
    probes: list[tuple[float, list[str]]],
) -> None:
    heads = {name.partition(".")[0] for name in probes[0][1]}
    assert "aiocomm" in heads
    optional = {"ray", "pytest", "numpy", "rich", "typer", "safetensors", "hypothesis", "cupy"}
    assert not heads & optional


def test_importing_aiocomm_is_quick(probes: list[tuple[float, list[str]]]) -> None:
    # The bar is 0.15 s where torch takes 0.8 s: in its time, since others may use the processor
    # meanwhile. The number of modules catches what would hide in that.
    assert min(ratio for ratio, _ in probes[1:]) < 0.2
    assert len(probes[0][1]) < 150
