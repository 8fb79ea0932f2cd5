// Sends descriptors between processes of one machine, over a unix socket with a name and without a
// file. Ranks exchange the names over their communicator, so other processes do not know them.
// Every message must carry the receiver's token.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace pycoll::device {

// How long a rank waits for the descriptors of its peers.
inline constexpr Nanoseconds kPostPatience = 10'000'000'000;

// The name of a rank's socket and its token; plain bytes, sent between processes.
struct PostAddress {
  std::array<unsigned char, 16> name;
  std::array<unsigned char, 16> token;
};

// One thread at a time.
class Post {
 public:
  // kTransport where the system refuses a socket.
  static Status open(std::unique_ptr<Post>* post);
  const PostAddress& address() const { return address_; }

  // Gives `mine` to each of `peers` (its rank and address) and takes one descriptor of each, into
  // `theirs` by rank. A descriptor that has not come within `patience` stays invalid; all do if a
  // peer cannot be reached. Blocks for at most `patience`.
  void exchange(std::uint32_t rank, const UniqueFd& mine,
                const std::vector<std::pair<std::uint32_t, PostAddress>>& peers,
                Nanoseconds patience, std::vector<UniqueFd>* theirs);

 private:
  bool send(std::uint32_t rank, const UniqueFd& mine, const PostAddress& to) const;
  bool take(std::vector<UniqueFd>* theirs) const;

  PostAddress address_{};
  UniqueFd socket_;
};

}  // namespace pycoll::device
