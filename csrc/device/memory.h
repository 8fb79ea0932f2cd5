// What kernels may do to memory and to each other: the only place where device code touches either.
// It has two halves with the same functions, this header picks one: memory_cuda.h is a line of PTX
// each, memory_emulated.h asks an emulation that is free to do whatever the PTX memory model
// allows.
//
//   load, load16, store, store16       weak: ordered with the same thread's accesses to the same
//                                      bytes and nothing else; a weak load may give old bytes until
//                                      the block has acquired. Aligned to their size.
//   load_relaxed, store_relaxed        seen by all devices and the host sooner or later, in any
//                                      order. Of 16 bytes each half of 8 arrives by itself.
//   store16_of_line, load16_of_line    the same, of eight neighbouring lanes at one aligned line of
//                                      128 bytes: the line arrives as one. No memory model promises
//                                      that; NVLink and the caches of sm_70 and later do it.
//   load_acquire, store_release        system scope. A release covers what the thread stored
//   before,
//                                      and what others of its block stored before a sync it was in.
//   fence                              release and acquire of everything, system scope
//   sync_any                           all threads of the block meet; true if any of them says so.
//                                      What they stored before is seen by all of them afterwards.
//   warp_any                           the same for a warp, without order of memory
//   pause                              a wait that looked at both places in vain; looks again
//
// thread() is below threads(), a multiple of kWarp; block() counts from zero.
#pragma once

#if defined(__CUDACC__)
#include "device/memory_cuda.h"
#else
#include "device/memory_emulated.h"
#endif
