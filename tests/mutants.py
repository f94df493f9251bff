"""Break the lines that decide, one at a time, and see whether the fast tests notice.

    python -m tests.mutants [--number 300] [--seed 0] [--jobs 2] [--kept FILE] [FILE[:LINE] ...]

A mutant is one small change in the body of a function: a comparison turned around, a statement
left out, branches swapped, a number too large, `and` for `or`. Tests are imported once; then a
process is forked for each mutant, which puts the changed code into the functions that are there
and runs the tests of that file, the cheapest first, until one fails. So a mutant that is noticed
costs next to nothing, one that is not what its tests take, and none an import.
One that needs much more CPU than the tests do is killed too: it loops.

Prints the share that was killed, file by file, and every survivor. One that cannot be noticed, as
what it changes makes no difference, is explained in EQUIVALENT and is not drawn. To have another
file looked after, add it to TESTS with the tests that should.

With `--kept FILE` each outcome is written there at once, and those killed before are not run again:
a run that was stopped goes on, and one after new tests runs the survivors alone. Which are drawn
depends on the seed and on each mutant alone, so that a changed line does not change the draw.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
UNIT = "tests/unit"
LAW6 = f"{UNIT}/comm/test_law6.py"
PROTOCOL = (f"{UNIT}/comm/test_protocol.py", LAW6)
CREWS = f"{UNIT}/comm/test_crew_schedules.py"
FOLLOWER = (f"{UNIT}/comm/test_follower.py",)
CONDUCTOR = (f"{UNIT}/train/test_conductor.py",)
TESTS: dict[str, tuple[str, ...]] = {
    "elastix/comm/protocol/group_protocol.py": (*PROTOCOL, CREWS),
    "elastix/comm/protocol/in_group.py": PROTOCOL,
    "elastix/comm/protocol/crew.py": (*FOLLOWER, f"{UNIT}/comm/test_standing.py", CREWS),
    "elastix/comm/protocol/follower.py": (*FOLLOWER, CREWS),
    "elastix/comm/protocol/standing.py": (f"{UNIT}/comm/test_standing.py",),
    "elastix/comm/protocol/joiner.py": PROTOCOL,
    "elastix/comm/protocol/inbox.py": PROTOCOL,
    "elastix/comm/protocol/calls.py": (f"{UNIT}/comm/test_calls.py",),
    "elastix/comm/protocol/recovery.py": (f"{UNIT}/comm/test_recovery.py", LAW6),
    "elastix/comm/protocol/membership.py": (f"{UNIT}/comm/test_membership.py", LAW6, *CONDUCTOR),
    "elastix/data/cursor.py": (f"{UNIT}/data/test_cursor.py", LAW6),
    "elastix/data/sample_order.py": tuple(
        f"{UNIT}/data/test_{name}.py" for name in ("cursor", "permutation", "rehearsal")
    ),
    "elastix/comm/slice_tree.py": (f"{UNIT}/comm/test_slice_tree.py",),
    "elastix/data/slice_assignment.py": (f"{UNIT}/data/test_slice_assignment.py",),
    "elastix/train/replica/vote.py": (
        f"{UNIT}/train/test_draw_comparison.py",
        f"{UNIT}/train/test_guard.py",
    ),
    "elastix/train/replica/sentinel.py": (f"{UNIT}/train/test_sentinel.py",),
    "elastix/train/replica/recomputation.py": (f"{UNIT}/train/test_recomputation.py",),
    "elastix/data/loader_order.py": (f"{UNIT}/data/test_loader_order.py",),
    "elastix/train/replica/guard.py": (f"{UNIT}/train/test_guard.py",),
    "elastix/sharding.py": (f"{UNIT}/test_sharding.py",),
    "elastix/train/checkpoint/assembly.py": (f"{UNIT}/train/test_assembly.py",),
    "elastix/train/checkpoint/schedule.py": (f"{UNIT}/train/test_retention.py",),
    "elastix/train/control/limits.py": (f"{UNIT}/train/test_limits.py",),
    "elastix/train/control/divergence.py": (f"{UNIT}/train/test_divergence.py", *CONDUCTOR),
    "elastix/train/control/conductor.py": (*CONDUCTOR, f"{UNIT}/train/test_shadows.py"),
    "elastix/train/control/shadows.py": (
        f"{UNIT}/train/test_shadows.py",
        f"{UNIT}/comm/test_shadow_schedules.py",
    ),
    "elastix/train/control/failure_detector.py": (
        f"{UNIT}/train/test_failure_detector.py",
        *CONDUCTOR,
    ),
    "elastix/train/control/quorum.py": (f"{UNIT}/train/test_quorum.py", *CONDUCTOR),
    "elastix/train/control/reachability.py": (f"{UNIT}/train/test_reachability.py", *CONDUCTOR),
}
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "elastix/train/replica/recomputation.py",
        "before = {w: [r for r in found[:2] if r is not None] for w, found in rows.items()}",
        "3 instead of 2",
    ): "what was computed again is looked at beside it anyway",
    (
        "elastix/train/control/reachability.py",
        'self._error = ""',
        "left out: self._error = ''",
    ): "declares the attribute: it is read after it was heard",
    (
        "elastix/data/cursor.py",
        "if other_stop <= start or other_start >= stop:",
        "Gt in: other_start >= stop",
    ): "a span that ends where the other begins is left whole either way",
    (
        "elastix/comm/protocol/membership.py",
        "gone = tuple(w for w in gone if self._confirmed.get(w, 0) < generation)",
        "1 instead of 0",
    ): "the first generation is a founding, and lets nobody go",
    (
        "elastix/comm/protocol/membership.py",
        "self._last_urgent = 0",
        "1 instead of 0",
    ): "generations are counted from 1, and it is only asked whether one is below it",
    (
        "elastix/comm/protocol/membership.py",
        "return []",
        "left out: return []",
    ): "saves a look at all members, of whom none would be found",
}
"""Mutants that nothing can notice: file, line, the change in words; and why."""

_OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=mutants"]
_OPTIONS += ["-k", "not broken_rule and not thousands"]  # about the simulation, and its size
_OPTIONS += ["--timeout=3600"]  # CPU time decides: on a busy machine the clock would kill as well
_SLACK_S = 5.0
_MEMORY = 4 << 30

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_FINE = 16
"""A number below is made one larger. Another is doubled: a limit of 60 s is none of exactly 60."""

_EXTREMES = {"max": "min", "min": "max", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the file, from the root of the repository.
        number: of the change among all that the file offers.
        line: where.
        what: the change in words.
        occurrence: of this change in the file, among those with the same words.
    """

    path: str
    number: int
    line: int
    what: str
    occurrence: int

    @property
    def name(self) -> str:
        """Stays what it is when other lines of the file change."""
        return f"{self.path} {self.occurrence} {self.what}"


class Change:
    """A change of a syntax tree that can be taken back: `holder.field` becomes `new`."""

    def __init__(self, node: ast.AST, holder: ast.AST, field: str, new: object, what: str) -> None:
        self.line: int = node.lineno  # type: ignore[attr-defined]
        self.what = what
        self._holder, self._field, self._new = holder, field, new

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        old = getattr(self._holder, self._field)
        setattr(self._holder, self._field, self._new)
        try:
            yield
        finally:
            setattr(self._holder, self._field, old)


def changes(tree: ast.Module) -> list[Change]:
    """All changes that a file offers, in the order of its lines."""
    found: list[Change] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            _in_statements(node, "body", found)
        elif isinstance(node, ast.Module):
            for statement in node.body:  # a number with a name
                if isinstance(statement, ast.Assign):
                    _in_expression(statement.value, found)
    return sorted(found, key=lambda change: change.line)


def _in_statements(holder: ast.AST, field: str, found: list[Change]) -> None:
    body: list[ast.stmt] = getattr(holder, field)
    for place, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef) or _is_text(statement):
            continue  # a function within is visited by itself
        if _worth_leaving_out(statement, holder):
            rest = [*body[:place], ast.copy_location(ast.Pass(), statement), *body[place + 1 :]]
            what = f"left out: {ast.unparse(statement).splitlines()[0]}"
            found.append(Change(statement, holder, field, rest, what))
        if isinstance(statement, ast.If):
            test = ast.copy_location(ast.UnaryOp(ast.Not(), statement.test), statement.test)
            what = f"turned around: if {ast.unparse(statement.test)}"
            found.append(Change(statement, statement, "test", test, what))
        if not isinstance(statement, ast.Raise):
            for part in _expressions(statement):
                _in_expression(part, found)
        for inner in ("body", "orelse", "finalbody"):
            if getattr(statement, inner, None):
                _in_statements(statement, inner, found)
        for case in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            _in_statements(case, "body", found)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """What it computes itself, without the statements within."""
    for name, value in ast.iter_fields(statement):
        for part in value if isinstance(value, list) else [value]:
            if name != "annotation" and isinstance(part, ast.expr | ast.withitem):
                yield part


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _worth_leaving_out(statement: ast.stmt, holder: ast.AST) -> bool:
    """Not an assignment to a local name: without it nearly every test ends in a NameError.

    Nor what goes on with a loop after an exception, or returns None at the end of a function: that
    happens anyway.
    """
    if isinstance(statement, ast.Continue) and isinstance(holder, ast.ExceptHandler):
        return False
    last = isinstance(holder, ast.FunctionDef) and statement is holder.body[-1]
    if last and ast.unparse(statement) == "return None":
        return False
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name) for target in statement.targets)
    kinds = (ast.Expr, ast.AugAssign, ast.Raise, ast.Return, ast.Continue)
    return isinstance(statement, kinds) and not (
        isinstance(statement, ast.Return) and statement.value is None
    )


def _in_expression(expression: ast.AST, found: list[Change]) -> None:
    if isinstance(expression, ast.JoinedStr):
        return  # what an error says
    text = ast.unparse(expression) if isinstance(expression, ast.expr) else ""
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        for other in _COMPARED[type(expression.ops[0])]:
            what = f"{other.__name__} in: {text}"
            found.append(Change(expression, expression, "ops", [other()], what))
    elif isinstance(expression, ast.BoolOp):
        swapped = ast.Or() if isinstance(expression.op, ast.And) else ast.And()
        what = f"{type(swapped).__name__} in: {text}"
        found.append(Change(expression, expression, "op", swapped, what))
    elif isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        twice = ast.copy_location(ast.UnaryOp(ast.Not(), expression.operand), expression.operand)
        found.append(Change(expression, expression, "operand", twice, f"without not: {text}"))
    elif isinstance(expression, ast.IfExp):
        test = ast.copy_location(ast.UnaryOp(ast.Not(), expression.test), expression.test)
        found.append(Change(expression, expression, "test", test, f"swapped: {text}"))
    elif isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add | ast.Sub):
        other = ast.Sub() if isinstance(expression.op, ast.Add) else ast.Add()
        what = f"{type(other).__name__} in: {text}"
        found.append(Change(expression, expression, "op", other, what))
    elif isinstance(expression, ast.Constant) and type(expression.value) is int:
        more = expression.value + (1 if expression.value < _FINE else expression.value)
        found.append(Change(expression, expression, "value", more, f"{more} instead of {text}"))
    elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        name = expression.func
        if name.id in _EXTREMES:
            found.append(Change(expression, name, "id", _EXTREMES[name.id], f"not {text}"))
    for part in ast.iter_child_nodes(expression):
        _in_expression(part, found)


# ---------------------------------------------------------------------------- putting it in


def put_in(module: ModuleType, source: ast.Module) -> None:
    """Give the functions and numbers of a module the code of `source`, wherever they are used."""
    compiled = {code.co_qualname: code for code in _codes(_compiled(source, module))}
    for function in _functions(module):
        code = compiled.get(function.__code__.co_qualname)
        if code is not None:
            function.__code__ = code
    for statement in source.body:
        if isinstance(statement, ast.Assign) and _is_number(statement.value):
            value = eval(ast.unparse(statement.value), dict(vars(module)))
            for target in statement.targets:
                setattr(module, ast.unparse(target), value)


def _is_number(expression: ast.expr) -> bool:
    """Written as such, or computed of such."""
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    kinds += (ast.Call, ast.expr_context)
    return all(
        isinstance(part, kinds) or (isinstance(part, ast.Name) and part.id == "Fraction")
        for part in ast.walk(expression)
    )


def _compiled(source: ast.Module, module: ModuleType) -> CodeType:
    code: CodeType = compile(source, str(module.__file__), "exec")
    return code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Those of functions at the top and in classes; what is within a function comes with it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            if not constant.co_flags & 0x2:  # the body of a class, which has no fast locals
                yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    owners = [module, *(o for o in vars(module).values() if isinstance(o, type))]
    for owner in owners:
        if isinstance(owner, type) and owner.__module__ != module.__name__:
            continue
        for value in vars(owner).values():
            inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
            inner = getattr(inner, "__wrapped__", inner)
            if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
                yield inner


# ---------------------------------------------------------------------------- running them


class CheapestFirst:
    """A plugin for pytest: which test takes how long, and the order that follows from it.

    Attributes:
        limited: a test is killed that needs much more CPU than it did.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.limited = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.limited:
            usual = self.seconds.get(nodeid, 0.0)
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            soon = int(time.process_time() + 2 * usual + _SLACK_S) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (min(soon, most), most))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def run_tests(
    tests: tuple[str, ...],
    order: CheapestFirst,
    limit_s: float | None,
    put: Callable[[], None],
    done: Callable[[], object] = lambda: None,
) -> int:
    """In a process of its own, whose id is returned; its status is 0 if all pass.

    Args:
        tests: files.
        order: in which they run; knows afterwards, in that process, how long each took.
        limit_s: CPU seconds after which it is killed.
        put: called there before the tests.
        done: called there after them.
    """
    process = os.fork()
    if process == 0:
        status = 1
        try:
            if limit_s is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
                order.limited = True
                resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            put()
            status = int(pytest.main([*_OPTIONS, *tests], plugins=[order]))
            done()
        finally:
            os._exit(status)
    return process


class Running:
    """Mutants under way, so many at a time.

    Args:
        jobs: how many.
        tell: hears of each mutant whether it was killed.
    """

    def __init__(self, jobs: int, tell: Callable[[Mutant, bool], None]) -> None:
        self._jobs = jobs
        self._tell = tell
        self._started: dict[int, Mutant] = {}
        self.survivors: list[Mutant] = []
        self.killed = 0

    def start(self, process: int, mutant: Mutant) -> None:
        self._started[process] = mutant
        while len(self._started) >= self._jobs:
            self._wait()

    def finish(self) -> None:
        while self._started:
            self._wait()

    def _wait(self) -> None:
        process, status = os.wait()
        mutant = self._started.pop(process)
        self._tell(mutant, status != 0)
        if status == 0:
            self.survivors.append(mutant)
            done = self.killed + len(self.survivors)
            print(f"{done}: survived  {mutant.path}:{mutant.line}  {mutant.what}", flush=True)
        else:
            self.killed += 1


def measured(test: str) -> tuple[float, dict[str, float]]:
    """CPU seconds that a file of tests takes when nothing is broken; how long each test in it took.

    Raises:
        SystemExit: one fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    order = CheapestFirst()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as told:
        tell = lambda: Path(told.name).write_text(json.dumps(order.seconds))  # noqa: E731
        _, status = os.waitpid(run_tests((test,), order, None, lambda: None, tell), 0)
        if status:
            raise SystemExit(f"{test} fails, with nothing broken.")
        seconds = json.load(told)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime, seconds


def all_mutants(offered: dict[str, list[Change]]) -> list[Mutant]:
    """Those that each file offers."""
    mutants = []
    for path, found in offered.items():
        seen: Counter[str] = Counter()
        for number, change in enumerate(found):
            mutants.append(Mutant(path, number, change.line, change.what, seen[change.what]))
            seen[change.what] += 1
    return mutants


def _without_equivalent(mutants: list[Mutant]) -> list[Mutant]:
    """Those that something could notice.

    Raises:
        SystemExit: a line that EQUIVALENT has is not there any more.
    """
    lines = {path: (ROOT / path).read_text().splitlines() for path in TESTS}
    said = {m: (m.path, lines[m.path][m.line - 1].strip(), m.what) for m in mutants}
    if gone := EQUIVALENT.keys() - set(said.values()):
        raise SystemExit(f"in EQUIVALENT, and not in the code: {gone}")
    return [mutant for mutant in mutants if said[mutant] not in EQUIVALENT]


def drawn(mutants: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """So many of them, or all if that is 0, in an order that the seed and their names decide."""
    digest = lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest()  # noqa: E731
    return sorted(mutants, key=digest)[: number or None]


class Kept:
    """Outcomes in a file, one JSON object a line; without a path they are kept nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        told = [json.loads(line) for line in lines]
        self.killed = {line["mutant"] for line in told if line.get("killed")}
        self._costs = {line["tests"]: line for line in told if "tests" in line}

    def tell(self, mutant: Mutant, killed: bool) -> None:
        """A mutant was killed, or not."""
        self._write({"mutant": mutant.name, "killed": killed})

    def cost(self, test: str) -> tuple[float, dict[str, float]]:
        """As `measured` has it; as it was, if neither these tests nor the code have changed."""
        found = hashlib.sha256()
        for path in (test, *TESTS):
            found.update((ROOT / path).read_bytes())
        line = self._costs.get(test)
        if line is None or line["of"] != found.hexdigest():
            seconds, each = measured(test)
            line = {"tests": test, "of": found.hexdigest(), "seconds": seconds, "each": each}
            self._write(line)
        return line["seconds"], line["each"]

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def chosen(mutants: list[Mutant], wanted: list[str]) -> list[Mutant]:
    """Those in the files, or on the lines (FILE:LINE), that are wanted."""
    return [m for m in mutants if m.path in wanted or f"{m.path}:{m.line}" in wanted]


def summary(mutants: list[Mutant], survivors: list[Mutant]) -> str:
    """A line for each file: of how many mutants how many were killed, and the share."""
    made, left = Counter(m.path for m in mutants), Counter(m.path for m in survivors)
    made["all"], left["all"] = len(mutants), len(survivors)
    width = max(map(len, made))
    return "\n".join(
        f"{path:{width}}  {made[path] - left[path]:4} of {made[path]:4}"
        f"  {1 - left[path] / made[path]:6.1%}"
        for path in made
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), help="those drawn in these alone")
    parser.add_argument("--number", type=int, default=300, help="drawn of all files; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, help="outcomes; those killed are not run again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    os.chdir(ROOT)
    import hypothesis

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # found is enough
    hypothesis.settings.register_profile(
        "mutants", deadline=None, phases=phases, derandomize=True, database=None
    )
    trees = {path: ast.parse((ROOT / path).read_text()) for path in TESTS}
    offered = {path: changes(tree) for path, tree in trees.items()}
    possible = _without_equivalent(all_mutants(offered))
    print(f"{len(possible)} mutants can be made; {len(EQUIVALENT)} kinds make no difference")
    mutants = chosen(drawn(possible, options.number, options.seed), options.files)
    kept = Kept(options.kept)
    before = [mutant for mutant in mutants if mutant.name in kept.killed]
    made = [mutant for mutant in mutants if mutant.name not in kept.killed]
    used = sorted({test for mutant in made for test in TESTS[mutant.path]})
    if used and pytest.main(["--collect-only", "-qq", "-W", "ignore", *_OPTIONS[1:], *used]):
        raise SystemExit("the tests cannot be collected.")
    costs = {test: kept.cost(test) for test in used}
    print(
        f"{len(made)} are made, {len(before)} were killed before; the tests take",
        *(f"{seconds:.1f} s" for seconds, _ in costs.values()),
        flush=True,
    )
    started = time.monotonic()
    running = Running(options.jobs, kept.tell)
    for mutant in made:
        module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
        tree, tests = trees[mutant.path], TESTS[mutant.path]
        order = CheapestFirst()
        for test in tests:
            order.seconds |= costs[test][1]
        limit_s = sum(costs[test][0] for test in tests) + _SLACK_S
        with offered[mutant.path][mutant.number].made():
            ast.fix_missing_locations(tree)
            put = partial(put_in, module, tree)
            running.start(run_tests(tests, order, limit_s, put), mutant)
    running.finish()
    print(f"seed {options.seed}, in {time.monotonic() - started:.0f} s")
    print(summary(sorted(mutants, key=lambda m: m.path), running.survivors))
    for mutant in sorted(running.survivors, key=lambda m: (m.path, m.line)):
        print(f"  {mutant.path}:{mutant.line}  {mutant.what}")


if __name__ == "__main__":
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    sys.exit(main())
