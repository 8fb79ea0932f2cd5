#include "bindings/calls/offers.h"

#include <pybind11/stl.h>

#include <utility>

#include "bindings/calls/fused_calls.h"

namespace pycoll::bindings {
namespace {

// Whether the definition's view is the memory that native code reads of the same argument.
bool is_view_of(const BufferView& view, PyObject* object, const ContiguousView& flat) {
  return object != nullptr && view.contiguous && view.data == flat.data &&
         view.dtype == flat.dtype && view.count == flat.count;
}

}  // namespace

thread_local Offers* Offers::current = nullptr;

Offers::Offers(const PythonCall& call) : call_(call), outer_(current) {
  current = this;
  ParsedCall parsed;
  if (parse(call.kind, call.arguments, &parsed) && CallKey::has_plain_words(parsed)) {
    before_.emplace(call.kind, parsed);
  }
}

Offers::~Offers() { current = outer_; }

Offers* Offers::of(const py::object& engine) {
  return current != nullptr && current->call_.self->native == engine.ptr() ? current : nullptr;
}

void Offers::take() noexcept {
  if ((told_.empty() && messages_.empty()) || call_.self->state == nullptr) return;
  try {
    PyObject* x = at(call_.arguments, Parameter::kX);
    if (is_list(x)) return take_list(items_of(x));
    ParsedCall parsed;
    if (!before_ || !parse(call_.kind, call_.arguments, &parsed) || !before_->fits(parsed)) return;
    if (is_message(call_.kind)) return add_messages(parsed);
    if (told_.size() == 1) (void)add(parsed, told_.front());
  } catch (const std::exception&) {
    told_.clear();  // without memory the call stays unknown; its result stands
  }
}

void Offers::add_messages(const ParsedCall& parsed) {
  const auto compiled = std::make_shared<CompiledCall>(CallKey(call_.kind, parsed));
  for (const ToldMessage& told : messages_) {
    const bool sends = told.kind == executor::MessageRequest::Kind::kSend;
    if (!is_view_of(told.view, sends ? parsed.x : parsed.out,
                    sends ? parsed.source : parsed.target)) {
      return;
    }
    compiled->leaves = told.leaves;
    compiled->messages.push_back({told.kind, told.peer, told.tag, {nullptr, told.view.bytes()}});
  }
  if (compiled->is_whole()) call_.self->state->cache.add(parsed, compiled);
}

// The cache holds every array of a list as a separate call that shares a message with others.
void Offers::take_list(const py::tuple& xs) {
  PyObject* out = at(call_.arguments, Parameter::kOut);
  const py::tuple outs = is_list(out) ? items_of(out) : py::tuple();
  if (told_.size() != xs.size() || (is_list(out) && outs.size() != xs.size())) return;
  ParsedCall parsed;
  parsed.words = call_.arguments.data();
  if (!CallKey::has_plain_words(parsed)) return;
  Fusions fusions;
  for (std::size_t number = 0; number < xs.size(); ++number) {
    const auto place = static_cast<py::ssize_t>(number);
    PyObject* one = is_list(out) ? PyTuple_GET_ITEM(outs.ptr(), place) : Py_None;
    if (!parse(call_.kind, PyTuple_GET_ITEM(xs.ptr(), place), one, &parsed)) return;
    const CompiledCallHandle compiled = add(parsed, told_[number]);
    if (compiled == nullptr) return;
    fusions.add(*compiled, parsed.source, nullptr, nullptr, false);
  }
  fusions.compare_all();
  for (std::size_t number = 0; number < fusions.size(); ++number) {
    (void)compile_fusion(call_.self, fusions, number);
  }
}

CompiledCallHandle Offers::add(const ParsedCall& parsed, const Told& told) {
  if (told.source && !is_view_of(*told.source, parsed.x, parsed.source)) return nullptr;
  if (told.target && !told.makes) {
    const bool in_place = parsed.out == parsed.x;
    if (!is_view_of(*told.target, parsed.out, in_place ? parsed.source : parsed.target)) {
      return nullptr;
    }
  }
  CallCache& cache = call_.self->state->cache;
  if (told.request == nullptr) {
    const CompiledCallHandle* known = cache.find(call_.kind, parsed);
    if (known != nullptr) return *known;
  }
  const auto compiled = std::make_shared<CompiledCall>(CallKey(call_.kind, parsed));
  compiled->exchanges = exchanges_;
  compiled->reads = told.source.has_value();
  compiled->writes = told.target.has_value();
  if (told.request != nullptr) {
    compiled->operation = operation_of(*told.request, told.source ? told.source->bytes() : 0,
                                       told.target ? told.target->bytes() : 0);
  }
  compiled->makes = told.makes;
  if (told.makes && told.target) {
    compiled->dtype = told.target->dtype;
    compiled->shape = told.target->shape;
    // make_flat() makes an array of x's class and dtype.
    if (parsed.x != nullptr && compiled->dtype != parsed.source.dtype) return nullptr;
  }
  compiled->identity = told.identity;
  compiled->message = told.message;
  if (told.message) compiled->op = static_cast<ReduceOp>(told.message.attr("code").cast<int>());
  cache.add(parsed, compiled);
  return compiled;
}

namespace {

std::optional<BufferView> copy_of(const BufferView* view) {
  return view == nullptr ? std::nullopt : std::optional<BufferView>(*view);
}

void offer(const py::object& engine, const std::shared_ptr<RequestHandle>& request,
           const BufferView* source, const BufferView* target, bool makes, py::object message,
           std::string identity) {
  Offers* offers = Offers::of(engine);
  if (offers == nullptr) return;
  if (message.is_none()) message = py::object();
  offers->tell(
      {request, copy_of(source), copy_of(target), makes, std::move(message), std::move(identity)});
}

void offer_message(const py::object& engine, const BufferView& view, bool sends, int peer,
                   std::uint32_t tag, bool leaves) {
  Offers* offers = Offers::of(engine);
  if (offers == nullptr) return;
  using Kind = executor::MessageRequest::Kind;
  offers->tell(Offers::ToldMessage{view, sends ? Kind::kSend : Kind::kRecv, peer, tag, leaves});
}

std::vector<std::byte> bytes_of(const BufferView& view) {
  return {view.data, view.data + view.bytes()};
}

void offer_exchange(const py::object& engine, const RequestHandle& request, const BufferView* mine,
                    const BufferView& every) {
  Offers* offers = Offers::of(engine);
  if (offers == nullptr) return;
  Exchange exchange;
  exchange.operation = operation_of(request, mine == nullptr ? 0 : mine->bytes(), every.bytes());
  if (mine != nullptr) exchange.mine = bytes_of(*mine);
  exchange.expected = bytes_of(every);
  exchange.in_place = mine != nullptr && mine->data == every.data;
  offers->tell(std::move(exchange));
}

}  // namespace

void bind_offers(py::module_& module) {
  module.def("offer", &offer, py::arg("engine"), py::arg("request").none(true),
             py::arg("source").none(true), py::arg("target").none(true), py::arg("makes"),
             py::arg("message") = py::none(), py::arg("identity") = py::bytes(),
             "Tell native code what the current call does, so that it can run such calls later.");
  module.def("offer_exchange", &offer_exchange, py::arg("engine"), py::arg("request"),
             py::arg("mine").none(true), py::arg("every"),
             "Tell it of an exchange that the current call has run before its operation.");
  module.def("offer_message", &offer_message, py::arg("engine"), py::arg("view"), py::arg("sends"),
             py::arg("peer"), py::arg("tag"), py::arg("leaves"),
             "Tell it of a message that the current call posts: of x, or into `out`; from any rank "
             "if `peer` is -1. `leaves`: the call returns a Work of the message.");
}

}  // namespace pycoll::bindings
