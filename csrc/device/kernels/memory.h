// Everything that kernels do to memory and to other threads: no other device code accesses either.
// The header picks one of two files with the same functions. memory_cuda.h implements each by a
// line of PTX. memory_emulated.h calls an emulation, which may do all that the PTX memory model
// allows.
//
//   load, load16, store, store16       weak: ordered with the same thread's accesses to the same
//                                      bytes and nothing else; a weak load may give old bytes until
//                                      the block has acquired. Aligned to their size.
//   load_relaxed, store_relaxed        visible to all devices and the host after some time, in any
//                                      order. Of 16 bytes each half of 8 arrives by itself.
//   store16_of_line, load16_of_line    relaxed, by eight neighbouring threads to one aligned line
//                                      of 128 bytes: the line arrives as one. No memory model
//                                      promises that; NVLink and caches of sm_70 and later do it.
//   add_relaxed                        adds to a word of this device's memory, in any order. No
//                                      thread of the launch loads or stores the word.
//   load_acquire, store_release        system scope. A release covers the thread's earlier stores,
//                                      and those that other threads of its block made before a sync
//                                      with it.
//   fence                              release and acquire of everything, system scope
//   sync_any                           block barrier; true if any thread passes true. Every thread
//                                      sees afterwards what the others stored before.
//   warp_any, warp_bits                the vote of a warp, without order of memory: whether any
//                                      thread passes true; bit i is set if thread i does
//   warp_take                          the word that another thread of the warp passes, without
//                                      order of memory; all threads of the warp call it
//   pause                              called after a poll of both places found nothing
//
// thread() is below threads(), a multiple of kWarp; block() counts from zero.
#pragma once

#if defined(__CUDACC__)
#include "device/kernels/memory_cuda.h"
#else
#include "device/kernels/memory_emulated.h"
#endif
