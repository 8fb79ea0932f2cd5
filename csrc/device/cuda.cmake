# kernels/kernels.cu becomes one fat binary that kernels/cuda.cpp embeds. nvcc is called directly,
# once per architecture so that the calls run in parallel; the CUDA language of CMake would link its
# runtime.
# PYCOLL_CUDA: AUTO builds kernels where nvcc is found, ON fails without it, OFF leaves them out.
set(PYCOLL_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE PYCOLL_CUDA PROPERTY STRINGS AUTO ON OFF)
# Several builds of the same sources share compiled kernels there.
set(PYCOLL_CUDA_CACHE "" CACHE PATH "Folder that keeps compiled CUDA kernels; empty: none is kept")
set(PYCOLL_HAVE_CUDA OFF)
if(PYCOLL_CUDA)
  find_program(PYCOLL_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(PYCOLL_NVCC)
    execute_process(COMMAND ${PYCOLL_NVCC} --version OUTPUT_VARIABLE version ERROR_QUIET)
    string(REGEX MATCH "V[0-9.]+" nvcc_version "${version}")
    string(REGEX MATCH "release ([0-9]+)" found "${version}")
    # The first version that supports sm_100 and C++20 well.
    if(found AND CMAKE_MATCH_1 GREATER_EQUAL 13)
      set(PYCOLL_HAVE_CUDA ON)
    else()
      message(STATUS "CUDA kernels are left out: ${PYCOLL_NVCC} is older than CUDA 13")
    endif()
  endif()
  if(PYCOLL_CUDA STREQUAL "ON" AND NOT PYCOLL_HAVE_CUDA)
    message(FATAL_ERROR "PYCOLL_CUDA is ON, but nvcc of CUDA 13 or newer was not found; put it in "
                        "PATH or set CUDA_HOME")
  endif()
endif()

if(PYCOLL_HAVE_CUDA)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/device/kernels/kernels.cu)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/cuda)
  file(MAKE_DIRECTORY ${folder})
  # a*b+c keeps two roundings, as in all kernels.
  set(nvcc_command ${PYCOLL_NVCC} -std=c++20 -O3 --expt-relaxed-constexpr -fmad=false -Werror
                   all-warnings -I ${CMAKE_CURRENT_SOURCE_DIR})
  # The headers that device code includes. nvcc is slow, and the host's headers change more often.
  set(headers base/bytes.h base/types.h plan/plan.h kernels/codec_formats.h kernels/codecs.h
              kernels/cpu/lanes.h kernels/reduce.h device/kernels/codes/code_blocks.h
              device/kernels/codes/coding.h device/kernels/codes/quads.h
              device/kernels/codes/sparse_coding.h device/kernels/codes/sparse_sections.h)
  foreach(name arrays direct_write_windows executor formats local memory memory_cuda
          memory_emulated pack packing program protocols reductions wire_elements)
    list(APPEND headers device/kernels/${name}.h)
  endforeach()
  list(TRANSFORM headers PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set(cubin_script ${CMAKE_CURRENT_SOURCE_DIR}/device/cubin.cmake)
  set(cubins)
  set(PYCOLL_CUDA_REPORTS)
  set(images)
  foreach(architecture 80 90 100)
    set(cubin ${folder}/sm_${architecture}.cubin)
    # tests/cpp/device/kernels/check_resources.py reads the register counts that ptxas reports.
    set(report ${folder}/sm_${architecture}.txt)
    set(kept ${folder}/sm_${architecture})
    add_custom_command(
      OUTPUT ${cubin} ${report} ${kept}/kernels.ptx
      COMMAND ${CMAKE_COMMAND} "-Dnvcc=${nvcc_command}" -Dversion=${nvcc_version}
              "-Dsources=${source};${headers}" -Darchitecture=sm_${architecture}
              -Dfolder=${folder} "-Dcache=${PYCOLL_CUDA_CACHE}" -P ${cubin_script}
      DEPENDS ${source} ${headers} ${cubin_script}
      VERBATIM
      COMMENT "CUDA kernels for sm_${architecture}")
    list(APPEND cubins ${cubin})
    list(APPEND PYCOLL_CUDA_REPORTS ${report})
    list(APPEND images --image3=kind=elf,sm=${architecture},file=${cubin})
  endforeach()
  # Architectures after the last one compile the PTX that its cubin was made of.
  list(APPEND images --image3=kind=ptx,sm=100,file=${folder}/sm_100/kernels.ptx)
  get_filename_component(nvcc_folder ${PYCOLL_NVCC} DIRECTORY)
  set(fatbin ${folder}/kernels.fatbin)
  add_custom_command(
    OUTPUT ${fatbin}
    COMMAND ${nvcc_folder}/fatbinary --64 --compress-all --create=${fatbin} ${images}
    DEPENDS ${cubins} ${folder}/sm_100/kernels.ptx)
  set_source_files_properties(
    ${CMAKE_CURRENT_SOURCE_DIR}/device/kernels/cuda.cpp
    PROPERTIES OBJECT_DEPENDS ${fatbin}
               COMPILE_DEFINITIONS
               "PYCOLL_FATBIN=\"${fatbin}\";PYCOLL_CUDA_ARCHITECTURES=\"sm_80, sm_90, sm_100, PTX\"")
  string(APPEND left_out "|/no_cuda\\.cpp$")
else()
  string(APPEND left_out "|/cuda\\.cpp$")
endif()
set(PYCOLL_HAVE_CUDA ${PYCOLL_HAVE_CUDA} PARENT_SCOPE)
set(PYCOLL_CUDA_REPORTS ${PYCOLL_CUDA_REPORTS} PARENT_SCOPE)
