// Descriptors from every process to others of its machine, by a unix socket that has a name and no
// file: nobody else knows the name, which ranks tell each other over their communicator, nor the
// token that everything must carry which is left there.
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

// Where a rank's post arrives; travels between processes as it is.
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

  // Gives `mine` to each of `peers` (its rank and address), and takes one descriptor of each, in
  // `theirs` by rank; what has not come when `patience` ends stays invalid, and so does all if a
  // peer cannot be reached. Nothing here blocks for longer.
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
