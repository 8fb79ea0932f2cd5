#include "device/channels/post.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

namespace pycoll::device {
namespace {

constexpr std::chrono::milliseconds kNap{1};
constexpr char kPrefix[] = "pycoll-device-";

struct Letter {
  std::array<unsigned char, 16> token;
  std::uint32_t rank;
};

// The first byte of the path stays zero, which makes it a name without a file.
socklen_t make_address(const std::array<unsigned char, 16>& name, sockaddr_un* address) {
  std::string text = kPrefix;
  for (const unsigned char byte : name) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  *address = {};
  address->sun_family = AF_UNIX;
  text.copy(address->sun_path + 1, text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

template <std::size_t size>
bool draw(std::array<unsigned char, size>* bytes) {
  return ::getrandom(bytes->data(), size, 0) == static_cast<ssize_t>(size);
}

// The ancillary data of a message with one descriptor.
union Rights {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

}  // namespace

Status Post::open(std::unique_ptr<Post>* post) {
  auto made = std::make_unique<Post>();
  made->socket_.reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address;
  const bool drawn = draw(&made->address_.name) && draw(&made->address_.token);
  const socklen_t bytes = make_address(made->address_.name, &address);
  if (!drawn || !made->socket_.valid() ||
      ::bind(made->socket_.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    return Status::error(Code::kTransport, std::string("cannot make a unix socket for devices: ") +
                                               std::strerror(errno));
  }
  *post = std::move(made);
  return Status();
}

// False while the peer's queue is full, or if the peer cannot be reached.
bool Post::send(std::uint32_t rank, const UniqueFd& mine, const PostAddress& to) const {
  Letter letter{to.token, rank};
  iovec data{&letter, sizeof(letter)};
  Rights rights{};
  sockaddr_un address;
  msghdr message{};
  message.msg_namelen = make_address(to.name, &address);
  message.msg_name = &address;
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = rights.bytes;
  message.msg_controllen = sizeof(rights.bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = mine.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == sizeof(letter);
}

// False if no message is there. Drops a message without the token.
bool Post::take(std::vector<UniqueFd>* theirs) const {
  Letter letter{};
  iovec data{&letter, sizeof(letter)};
  Rights rights{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = rights.bytes;
  message.msg_controllen = sizeof(rights.bytes);
  const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  UniqueFd descriptor;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    descriptor.reset(fd);
  }
  if (got == sizeof(letter) && letter.token == address_.token && letter.rank < theirs->size()) {
    (*theirs)[letter.rank] = std::move(descriptor);
  }
  return true;
}

void Post::exchange(std::uint32_t rank, const UniqueFd& mine,
                    const std::vector<std::pair<std::uint32_t, PostAddress>>& peers,
                    Nanoseconds patience, std::vector<UniqueFd>* theirs) {
  SteadyClock clock;
  const Nanoseconds limit = later(clock.now(), patience);
  auto unsent = peers;
  const auto is_complete = [&] {
    return unsent.empty() && std::all_of(peers.begin(), peers.end(), [&](const auto& peer) {
             return (*theirs)[peer.first].valid();
           });
  };
  while (!is_complete() && clock.now() < limit) {
    std::erase_if(unsent, [&](const auto& peer) { return send(rank, mine, peer.second); });
    bool came = false;
    while (take(theirs)) came = true;
    if (!came && !is_complete()) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace pycoll::device
