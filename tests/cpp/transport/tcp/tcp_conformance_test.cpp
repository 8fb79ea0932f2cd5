// The transport contract over TCP: on loopback connections and on unix socket pairs, with one
// socket per peer and with several, over one rail and over several, and with kernel buffers so
// small that every segment moves in pieces. What is particular to TCP is in tcp_test.cpp.
#include "tests/cpp/transport/tcp/tcp_fixture.h"

namespace pycoll::conformance {
namespace {

using testing::tcp_medium, testing::Medium::kLoopback, testing::Medium::kUnixPair;
const Conformance one_socket(tcp_medium("loopback, 1 socket: ", {kLoopback, 1, 0}));
const Conformance three_sockets(tcp_medium("loopback, 3 sockets: ", {kLoopback, 3, 0}));
const Conformance two_rails(tcp_medium("loopback, 4 sockets, 2 rails: ", {kLoopback, 4, 0, 2}));
const Conformance three_rails(tcp_medium("loopback, 3 rails, 2 KiB buffers: ",
                                         {kLoopback, 3, 2048, 3}));
const Conformance small_buffers(tcp_medium("loopback, 2 KiB buffers: ", {kLoopback, 1, 2048}));
const Conformance unix_pairs(tcp_medium("unix pairs, 2 sockets: ", {kUnixPair, 2, 0}));
const Conformance many_small(tcp_medium("unix pairs, 8 sockets, 4 KiB buffers: ",
                                        {kUnixPair, 8, 4096}));

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
