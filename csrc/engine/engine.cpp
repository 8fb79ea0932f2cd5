#include "engine/engine.h"

namespace pycoll::engine {

Status Engine::create(EngineOptions options, std::unique_ptr<Engine>* engine) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return Status::error(Code::kInvalidArgument, "rank is " + std::to_string(options.rank) +
                                                     " of size " + std::to_string(options.size) +
                                                     ": expected a rank from 0 to size - 1");
  }
  std::unique_ptr<Engine> made(new Engine(std::move(options)));
  Status status = made->operations_.peers.check();
  if (status.ok()) *engine = std::move(made);
  return status;
}

Engine::Engine(EngineOptions options) : operations_(std::move(options)), diagnosis_(operations_) {}

std::shared_ptr<Operation> Engine::start(CollectiveRequest request, Nanoseconds timeout) {
  auto operation = operations_.collectives.start(std::move(request), timeout);
  tell_refused();
  return operation;
}

void Engine::start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                   std::shared_ptr<Operation> operation, Nanoseconds timeout) {
  operations_.collectives.start(std::move(call), input, output, std::move(operation), timeout);
  tell_refused();
}

void Engine::refuse(const std::string& why) {
  if (!failure().ok()) return;
  diagnosis_.refusals().tell(operations_.numbers.skip_call(), why);
  settle();
}

bool Engine::conclude(Collectives::Step step) {
  const bool changed = diagnosis_.conclude(step.event);
  settle();
  return changed || step.moved;
}

bool Engine::step_messages() {
  const OpenMessages::Step step = operations_.messages.step();
  if (step.broken >= 0) {
    diagnosis_.fail_broken(step.broken);
    settle();
  }
  return step.moved;
}

bool Engine::owes_reason() const {
  return !failure().ok() && !is_closed() && operations_.peers.have_unsent();
}

bool Engine::watch() {
  if (owes_reason()) return operations_.peers.poll(true);
  if (!failure().ok() || !operations_.active()) return false;
  bool moved = operations_.peers.poll(true);
  moved |= step();
  if (!failure().ok() || !operations_.active()) return true;
  moved = diagnosis_.look(moved);
  settle();
  return moved;
}

void Engine::look_on_stream(const std::string& operation, bool patient) {
  if (!failure().ok()) return;
  diagnosis_.look_on_stream(operation, patient);
  settle();
}

void Engine::fail_on_stream(const Status& status, const std::string& operation, double after) {
  if (!failure().ok()) return;
  diagnosis_.stream_order().fail(status, operation, after);
  settle();
}

void Engine::interrupt(const std::string& why) {
  if (!failure().ok()) return;
  diagnosis_.interrupt(why);
  settle();
}

void Engine::settle() {
  const Report& report = diagnosis_.report();
  if (!report.is_over() || std::exchange(ended_, true)) return;
  operations_.peers.let_go(transport::LetGo::kAll);
  operations_.collectives.end(report.verdict(), report.failure());
  operations_.messages.end(report.verdict(), report.failure());
}

void Engine::close() {
  if (is_closed()) return;
  diagnosis_.report().close();
  settle();
  operations_.peers.close();
}

}  // namespace pycoll::engine
