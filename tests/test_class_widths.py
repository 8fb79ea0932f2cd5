"""The width of classes: at most 12 public methods, and 6 arguments by position of a constructor.

A constructor has at most 3 arguments that are booleans, by name or position: each switches a mode.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cpp_classes import cpp_classes

ROOT = Path(__file__).resolve().parent.parent
METHODS = 12
PARAMETERS = 6
MODES = 3
#: Its methods are the collectives, as users of MPI know them; only its constructor counts.
PUBLIC = "communicator.Communicator"
#: Wider classes, each with the reason.
EXCEPTIONS = {
    "keyed_store.Store": "the whole interface of stores, 15 methods that users call by name",
    "membership.Membership": "torch.distributed calls these methods of a ProcessGroup by name",
    "process_group.PycollProcessGroup": "torch.distributed calls a method for each collective",
    "hooks.PowerSGDState": "it takes the arguments of torch's PowerSGDState, in torch's order",
    "device::Ll": "a protocol of device kernels, whose functions Pattern uses for its lines, too",
    "device::Programs": "one owner makes it, with the parts that it refers to",
    "kernels::VectorUnit": "the instructions of a processor that kernels use, one function each",
    "transport::SimWorld": "simulated time, network and faults change together at each event",
    "transport::shm::Arena": "allocations, lookups and forks work on one map under one lock",
}


def python_classes(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each class, its public methods, and its constructor's parameters.

    Properties and dunders are no methods here. Arguments that a call must name do not count.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        functions = [
            one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        methods = {
            one.name
            for one in functions
            if not one.name.startswith("_") and not any(map(is_property, one.decorator_list))
        }
        made_by = [one.args for one in functions if one.name == "__init__"]
        parameters = [len(args.posonlyargs) + len(args.args) - 1 for args in made_by]
        yield node.name, len(methods), max(parameters, default=0)


def modes_of(text: str) -> dict[str, int]:
    """Return how many arguments of each constructor are booleans."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        for one in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                arguments = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
                kinds = [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]
                found[node.name] = sum("bool" in re.split(r"\W+", kind) for kind in kinds)
    return found


def is_property(decorator: ast.expr) -> bool:
    last = ast.unparse(decorator).rpartition(".")[2]
    return last in ("property", "cached_property", "setter", "getter", "deleter")


def too_wide(found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {
        name: (methods, parameters)
        for name, (methods, parameters) in found.items()
        if methods > METHODS or parameters > PARAMETERS
    }


def widths_of(text: str) -> dict[str, tuple[int, int]]:
    return {name: (methods, parameters) for name, methods, parameters in python_classes(text)}


def cpp_widths_of(text: str) -> dict[str, tuple[int, int]]:
    return {one.name: (len(one.functions), one.parameters) for one in cpp_classes(text)}


def test_methods_and_parameters_of_python_are_counted() -> None:
    text = """
class Wide:
    def __init__(self, a, b=1, /, c=2, *d, e, f=3, **g): ...
    def one(self): ...
    @overload
    def two(self, x: int): ...
    def two(self, x): ...
    async def three(self): ...
    @classmethod
    def four(cls): ...
    def _own(self): ...
    def __len__(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, size): ...
    @functools.cached_property
    def much(self): ...
    class Inner:
        def five(self): ...
@dataclass
class Options:
    a: int
    b: int
"""
    assert widths_of(text) == {"Wide": (4, 3), "Options": (0, 0), "Inner": (1, 0)}


def test_public_functions_of_cpp_are_counted() -> None:
    text = """
#define NOTHING(x) struct Macro { \\
  void no(); }
namespace pycoll::engine {
namespace {
enum class Kind : int { kOne = 1, kTwo };
struct Plain { int a = f(1); std::function<void(int, int)> call; void (*old)(int); };
}  // namespace
class Wide final : public Base<int>, private Other {
 public:
  using Handle = std::unique_ptr<Wide, Retire>;
  Wide(int a, std::map<int, int> b = {}, const char* c = "a, b {");
  ~Wide();
  Wide& operator=(const Wide&) = delete;
  bool operator<(const Wide& other) const { return size_ < other.size_; }
  explicit operator bool() const { return true; }
  static Status create(Options options, Handle* made);
  void start(int a);
  template <typename Request, int width = 1>
  [[nodiscard]] std::map<int, std::vector<int>> start(Request&& request) { return {}; }
  int size() const { return size_; }
  int at(int place) const { return place > 1 ? 1 : '{'; }
  decltype(auto) look() noexcept { /* } */ return 2; }
  void take() override;
  friend bool same(const Wide& one);
  struct Inner { void run(); Inner() : a_{1}, b_{2} {} int a_{1}, b_{2}; };
 protected:
  void hidden();
 private:
  Wide(int a, int b, int c, int d);
  void own();
  int size_ = 0;
};
template <typename T>
struct Box<T*> { T* get(); };
inline int free_function(int a) { return a; }
}  // namespace pycoll::engine
"""
    classes = {one.name: one for one in cpp_classes(text)}
    assert cpp_widths_of(text) == {
        "engine::Plain": (0, 0),
        "engine::Wide": (4, 4),
        "engine::Wide::Inner": (1, 0),
        "engine::Box": (1, 0),
    }
    assert classes["engine::Wide"].functions == {"create", "start", "at", "look"}


def test_wide_classes_are_found() -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(METHODS + 1))
    assert too_wide(widths_of("class A:\n" + methods)) == {"A": (METHODS + 1, 0)}
    assert too_wide(widths_of("class A:\n    def __init__(self, a, b, c, d, e, f): ...")) == {}
    assert too_wide(widths_of("class A:\n    def __init__(self, a, b, c, d, e, f, g): ..."))
    functions = "".join(f"  void m{number}();\n" for number in range(METHODS))
    assert too_wide(cpp_widths_of(f"struct A {{\n{functions}}};")) == {}
    assert too_wide(cpp_widths_of(f"struct A {{\n{functions}  int more(int);\n}};"))


def test_booleans_of_constructors_are_counted() -> None:
    text = "class A:\n def __init__(self, a: bool, b: int, *, c: bool | None, d: Boolean): ..."
    assert modes_of(text) == {"A": 2}
    header = "struct A { A(bool a, map<pair<int>, bool> b, Bool c, const bool d = f(1, 2)); };"
    assert [one.modes for one in cpp_classes(header)] == [2]


def test_constructors_switch_few_modes() -> None:
    modes = {
        f"{path.stem}.{name}": count
        for path in sorted((ROOT / "pycoll").rglob("*.py"))
        for name, count in modes_of(path.read_text()).items()
    }
    assert len(modes) > 100, "no constructors were found"
    for path in cpp_headers():
        modes |= {one.name: one.modes for one in cpp_classes(path.read_text())}
    assert {name: count for name, count in modes.items() if count > MODES} == {}


def cpp_headers() -> list[Path]:
    found = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "bindings").rglob("*.h")]
    assert len(found) > 100, "the headers were not found"
    return found


def test_classes_are_narrow() -> None:
    texts = [(path, path.read_text()) for path in sorted((ROOT / "pycoll").rglob("*.py"))]
    wide = {
        f"{path.stem}.{name}": width
        for path, text in texts
        for name, width in too_wide(widths_of(text)).items()
    }
    for path in cpp_headers():
        wide |= too_wide(cpp_widths_of(path.read_text()))
    assert len(texts) > 100, "the files were not found"
    if wide.get(PUBLIC, (0, 0))[1] <= PARAMETERS:
        wide.pop(PUBLIC, None)
    assert set(wide) == set(EXCEPTIONS), "give classes objects of their own; take narrow ones off"
