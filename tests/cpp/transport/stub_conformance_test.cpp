// The conformance suite refuses a medium that breaks one promise of transport/capabilities.h. Each
// test puts a stub in front of a real medium. The stub replaces one ability, or let_go(), and
// passes everything else on. A case must fail over the stub, with the text that names the promise,
// and pass over the medium alone.
#include <sys/wait.h>
#include <unistd.h>

#include <string_view>

#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/shm/shm_fixture.h"
#include "tests/cpp/transport/tcp/tcp_fixture.h"
#include "transport/capabilities.h"

namespace pycoll::conformance {
namespace {

using transport::Capability;
using transport::DirectWrite;
using transport::DirectWriter;
using transport::LetGo;
using transport::Link;
using transport::LinkState;
using transport::Notice;
using transport::OutputQueue;
using transport::RecvChannel;
using transport::Segment;
using transport::SegmentHeader;
using transport::SendCapabilities;
using transport::SendChannel;
using transport::SourceRecord;
using transport::Transport;
using transport::TransportCapabilities;

using Owner = std::unique_ptr<Capability>;

// The promise that a stub breaks. The first two change the abilities of a real channel or
// transport, and return the owner of a replacement.
struct Breach {
  std::function<Owner(SendCapabilities& can, SendChannel& real)> send;
  std::function<Owner(TransportCapabilities& can)> transport;
  std::function<void(Transport& real, LetGo what)> let_go;
};

class StubSendChannel : public SendChannel {
 public:
  StubSendChannel(SendChannel& real, const Breach& breach)
      : real_(real), can_(real.capabilities()) {
    if (breach.send) owner_ = breach.send(can_, real);
  }

  std::byte* reserve(std::size_t bytes) override { return real_.reserve(bytes); }
  void commit(const SegmentHeader& header) override { real_.commit(header); }
  bool hand_over(const SegmentHeader& header, const std::byte* data) override {
    return real_.hand_over(header, data);
  }
  bool drained() override { return real_.drained(); }
  SendCapabilities capabilities() override { return can_; }

 private:
  SendChannel& real_;
  SendCapabilities can_;
  Owner owner_;
};

class StubLink : public Link {
 public:
  StubLink(Link& real, const Breach& breach) : real_(real), breach_(breach) {}

  SendChannel& send_channel(std::uint32_t number) override {
    auto& channel = channels_[number];
    if (channel == nullptr) {
      channel = std::make_unique<StubSendChannel>(real_.send_channel(number), breach_);
    }
    return *channel;
  }
  RecvChannel& recv_channel(std::uint32_t number) override { return real_.recv_channel(number); }
  void post(const Notice& notice) override { real_.post(notice); }
  Notice newest() override { return real_.newest(); }
  LinkState state() override { return real_.state(); }
  std::string reason() const override { return real_.reason(); }

 private:
  Link& real_;
  const Breach& breach_;
  std::unique_ptr<StubSendChannel> channels_[transport::kChannelsMax];
};

class StubTransport : public Transport {
 public:
  StubTransport(Transport& real, int size, const Breach& breach)
      : real_(real),
        breach_(breach),
        can_(real.capabilities()),
        links_(static_cast<std::size_t>(size)) {
    if (breach.transport) owner_ = breach.transport(can_);
  }

  std::string_view name() const override { return real_.name(); }
  Link* link(int peer) override {
    auto& link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) link = std::make_unique<StubLink>(*real_.link(peer), breach_);
    return link.get();
  }
  bool poll() override { return real_.poll(); }
  bool has_new_notices() override { return real_.has_new_notices(); }
  bool arm() override { return real_.arm(); }
  void disarm() override { real_.disarm(); }
  int event_fd() const override { return real_.event_fd(); }
  void let_go(LetGo what) override {
    breach_.let_go ? breach_.let_go(real_, what) : real_.let_go(what);
  }
  void close() override { real_.close(); }
  TransportCapabilities capabilities() override { return can_; }

 private:
  Transport& real_;
  const Breach& breach_;
  TransportCapabilities can_;
  Owner owner_;
  std::vector<std::unique_ptr<StubLink>> links_;
};

class StubFixture : public Fixture {
 public:
  StubFixture(std::unique_ptr<Fixture> real, int size, Breach breach)
      : real_(std::move(real)), breach_(std::move(breach)) {
    for (int rank = 0; rank < size; ++rank) {
      stubs_.push_back(std::make_unique<StubTransport>(real_->at(rank), size, breach_));
    }
  }

  Transport& at(int rank) override { return *stubs_[static_cast<std::size_t>(rank)]; }
  std::uint64_t depth() const override { return real_->depth(); }
  void idle() override { real_->idle(); }
  void kill(int rank) override { real_->kill(rank); }

 private:
  std::unique_ptr<Fixture> real_;
  Breach breach_;
  std::vector<std::unique_ptr<StubTransport>> stubs_;
};

Medium behind_stub(const Medium& medium, const Breach& breach) {
  Medium stub = medium;
  stub.make = [make = medium.make, breach](int size, std::uint64_t seed) {
    return std::make_unique<StubFixture>(make(size, seed), size, breach);
  };
  return stub;
}

// Runs the case in a child process. Returns what it printed, and "passed" at the end if no check
// failed.
std::string outcome(const Medium& medium, std::string_view name) {
  int ends[2];
  CHECK(::pipe(ends) == 0, "no pipe");
  const pid_t child = ::fork();
  CHECK(child >= 0, "no child process");
  if (child == 0) {
    CHECK(::dup2(ends[1], STDOUT_FILENO) >= 0, "no output");
    for (const Case& one : cases_about_capabilities(medium.has)) {
      if (one.name != name) continue;
      one.run(medium);
      std::printf("passed");
      std::fflush(stdout);
    }
    std::_Exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char piece[1024];
  for (ssize_t got = 0; (got = ::read(ends[0], piece, sizeof piece)) > 0;) {
    text.append(piece, static_cast<std::size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child, "the child process is gone");
  CHECK(WIFEXITED(status), "signal %d: %s", WTERMSIG(status), text.c_str());
  return text;
}

// Checks that the case passes behind a stub that breaks nothing, and that it fails with `why`
// behind one that breaks a promise.
void expect_refusal(const Medium& medium, const Breach& breach, std::string_view name,
                    std::string_view why) {
  const std::string faithful = outcome(behind_stub(medium, {}), name);
  CHECK(faithful == "passed", "without a breach: %s", faithful.c_str());
  Medium stub = behind_stub(medium, breach);
  stub.patience = 2'000'000'000;  // some stubs are refused because an event does not come
  const std::string broken = outcome(stub, name);
  CHECK(broken.find("check failed") != std::string::npos && broken.find(why) != std::string::npos,
        "%s is not refused for '%s': %s", std::string(name).c_str(), std::string(why).c_str(),
        broken.c_str());
}

// Handed-over segments stay in the sender for a while: the kernel takes only parts of them.
Medium tcp() { return testing::tcp_medium("", {testing::Medium::kUnixPair, 1, 4096}); }
Medium shm() { return testing::shm_medium({}); }

// --- OutputQueue

// Stands in for the real ability; `answer` makes the stub's has_unsent() from the real one.
struct Output : OutputQueue {
  bool has_unsent() const override { return answer(real->has_unsent()); }
  OutputQueue* real = nullptr;
  std::function<bool(bool unsent)> answer;
};

Breach unsent_is(std::function<bool(bool unsent)> answer) {
  return {.transport = [answer](TransportCapabilities& can) {
    auto stub = std::make_unique<Output>();
    stub->real = std::exchange(can.output, stub.get());
    stub->answer = answer;
    return stub;
  }};
}

TEST(output_that_is_said_to_be_sent_and_is_not) {
  const Breach breach = unsent_is([](bool) { return false; });
  expect_refusal(tcp(), breach, "unsent_output_leaves_by_poll", "waited in vain for a segment");
  expect_refusal(tcp(), breach, "output_that_the_peer_does_not_take_is_unsent",
                 "all channels are full, the peer has taken nothing");
}

TEST(output_that_is_sent_and_said_to_be_unsent) {
  const Breach breach =
      unsent_is([been = false](bool unsent) mutable { return been = been || unsent; });
  expect_refusal(tcp(), breach, "unsent_output_leaves_by_poll", "waited in vain for the output");
  expect_refusal(tcp(), breach, "output_that_the_peer_does_not_take_is_unsent",
                 "waited in vain for the output");
}

TEST(output_that_is_unsent_from_the_beginning) {
  expect_refusal(tcp(), unsent_is([](bool) { return true; }), "unsent_output_leaves_by_poll",
                 "before the first segment");
}

// --- DirectWriter, WriteWindows

struct Writer : DirectWriter {
  explicit Writer(DirectWriter& writer) : real(writer) {}
  std::byte* find_window(const SegmentHeader& header, const DirectWrite& place) override {
    return real.find_window(header, place);
  }
  bool is_answered(const SegmentHeader& header) override { return real.is_answered(header); }
  void write(std::byte* there, const std::byte* from, std::size_t bytes) override {
    real.write(there, from, bytes);
  }
  void commit_written(const SegmentHeader& header) override { real.commit_written(header); }
  DirectWriter& real;
};

template <typename Stub>
Breach writer_is() {
  return {.send = [](SendCapabilities& can, SendChannel&) {
    auto stub = std::make_unique<Stub>(*can.direct_writer);
    can.direct_writer = stub.get();
    return stub;
  }};
}

struct OfAnyAgreement : Writer {
  using Writer::Writer;
  std::byte* find_window(const SegmentHeader& header, const DirectWrite& place) override {
    SegmentHeader other = header;
    ++other.agreement;
    std::byte* const window = real.find_window(header, place);
    return window != nullptr ? window : real.find_window(other, place);
  }
};

struct OfNoAgreement : Writer {
  using Writer::Writer;
  std::byte* find_window(const SegmentHeader&, const DirectWrite&) override { return nullptr; }
};

struct OfAnyUse : Writer {
  using Writer::Writer;
  std::byte* find_window(const SegmentHeader& header, const DirectWrite& place) override {
    std::byte* const window = real.find_window(header, place);
    return window != nullptr ? window : real.find_window(header, {0, place.offset});
  }
};

struct NeverRevoked : Writer {
  using Writer::Writer;
  std::byte* find_window(const SegmentHeader& header, const DirectWrite& place) override {
    if (window == nullptr) window = real.find_window(header, place);
    return window;
  }
  std::byte* window = nullptr;
};

TEST(a_window_that_is_given_to_another_agreement) {
  expect_refusal(shm(), writer_is<OfAnyAgreement>(), "a_window_is_for_one_agreement",
                 "a window of another agreement");
}

TEST(a_window_that_its_own_agreement_does_not_get) {
  expect_refusal(shm(), writer_is<OfNoAgreement>(), "a_window_is_for_one_agreement",
                 "no window of this agreement");
}

TEST(a_window_that_is_given_to_another_use) {
  expect_refusal(shm(), writer_is<OfAnyUse>(), "direct_writes_arrive_in_the_window", "another use");
}

TEST(a_revoked_window_that_still_takes_writes) {
  expect_refusal(shm(), writer_is<NeverRevoked>(), "a_failed_receiver_revokes_its_window",
                 "waited in vain for the end of the window");
}

TEST(a_window_that_is_revoked_too_early) {
  const Breach breach{.let_go = [](Transport& real, LetGo) { real.let_go(LetGo::kAll); }};
  expect_refusal(shm(), breach, "a_failed_receiver_revokes_its_window",
                 "handed-over memory was given up only");
}

// A newer window without uses ends the old one like a revocation, and does not keep its memory.
TEST(a_revoked_window_whose_memory_is_allocated_again) {
  const Breach breach{.let_go = [](Transport& real, LetGo what) {
    if (what != LetGo::kAll) return real.let_go(what);
    real.link(0)->recv_channel(4).capabilities().windows->open_window({2, 0, 0, nullptr, 0});
  }};
  expect_refusal(shm(), breach, "a_failed_receiver_revokes_its_window",
                 "the memory of a revoked window is allocated again");
}

// --- SourceRecord

struct Record : SourceRecord {
  Record(SourceRecord& record, SendChannel& its_channel) : real(record), channel(its_channel) {}
  bool flushed() override { return real.flushed(); }
  bool reads(const std::byte* data, std::size_t bytes) override { return real.reads(data, bytes); }
  SourceRecord& real;
  SendChannel& channel;
};

template <typename Stub>
Breach record_is() {
  return {.send = [](SendCapabilities& can, SendChannel& real) {
    auto stub = std::make_unique<Stub>(*can.sources, real);
    can.sources = stub.get();
    return stub;
  }};
}

struct NamesNothing : Record {
  using Record::Record;
  bool flushed() override { return true; }
  bool reads(const std::byte*, std::size_t) override { return false; }
};

struct MissesMemory : Record {
  using Record::Record;
  bool reads(const std::byte*, std::size_t) override { return false; }
};

struct NamesAllMemory : Record {
  using Record::Record;
  bool reads(const std::byte*, std::size_t) override { return !real.flushed(); }
};

struct ForgetsNothing : Record {
  using Record::Record;
  bool flushed() override { return was_flushed = was_flushed && real.flushed(); }
  bool was_flushed = true;
};

struct NamesExposedMemory : Record {
  using Record::Record;
  bool flushed() override { return channel.drained(); }
};

TEST(a_record_without_memory_that_is_read) {
  expect_refusal(tcp(), record_is<NamesNothing>(), "a_record_names_what_was_handed_over",
                 "arrived changed");
  expect_refusal(tcp(), record_is<MissesMemory>(), "a_record_names_what_was_handed_over",
                 "two answers");
}

TEST(a_record_with_memory_that_is_not_read) {
  expect_refusal(tcp(), record_is<NamesAllMemory>(), "a_record_names_what_was_handed_over",
                 "memory next to what was handed over");
  expect_refusal(tcp(), record_is<ForgetsNothing>(), "a_record_names_what_was_handed_over",
                 "drained, and still read");
  expect_refusal(shm(), record_is<NamesExposedMemory>(), "exposed_payloads_arrive_unchanged",
                 "the record names exposed memory");
}

TEST(zero_copy_without_a_record) {
  const Breach breach{.send = [](SendCapabilities& can, SendChannel&) {
    can.sources = nullptr;
    return Owner();
  }};
  // A medium that does not claim a record passes the check of its abilities, but not this one.
  const Medium real = shm();
  Medium stub = behind_stub(real, breach);
  CHECK(outcome(real, "every_ability_is_there_or_nullptr") == "passed", "shared memory is refused");
  CHECK(outcome(stub, "every_ability_is_there_or_nullptr").find(": SourceRecord") !=
            std::string::npos,
        "a record that is claimed and missing is not refused");
  stub.has.sources = false;
  CHECK(
      outcome(stub, "every_ability_is_there_or_nullptr").find("exposes, and has no SourceRecord") !=
          std::string::npos,
      "zero-copy without a record is not refused");
}

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
