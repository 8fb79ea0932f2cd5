# Compiles the CUDA kernels for one architecture, or takes them from the cache. Run by cuda.cmake as
# a script, with these definitions:
#   nvcc          command line, without the options for files
#   version       of nvcc
#   sources       kernels/kernels.cu and the headers that it includes
#   architecture  sm_80 and the like
#   folder        gets ARCHITECTURE.cubin, ARCHITECTURE.txt (registers) and ARCHITECTURE/kernels.ptx
#   cache         folder of earlier results, named by a digest of all that they depend on, or empty
list(GET sources 0 source)
set(files ${architecture}.cubin ${architecture}.txt ${architecture}/kernels.ptx)
set(kept ${folder}/${architecture})
file(MAKE_DIRECTORY ${kept})

set(described "${nvcc} ${version}")
foreach(file ${sources})
  file(SHA256 ${file} digest)
  string(APPEND described " ${digest}")
endforeach()
string(SHA256 digest "${described}")
set(earlier ${cache}/${digest}/${architecture})
if(cache AND EXISTS ${earlier}/complete)
  foreach(file ${files})
    get_filename_component(name ${file} NAME)
    configure_file(${earlier}/${name} ${folder}/${file} COPYONLY)
    file(TOUCH ${folder}/${file})
  endforeach()
  return()
endif()

set(report ${folder}/${architecture}.txt)
execute_process(
  COMMAND ${nvcc} -Xptxas -v -cubin -arch=${architecture} ${source}
          -o ${folder}/${architecture}.cubin --keep --keep-dir ${kept}
  RESULT_VARIABLE status OUTPUT_FILE ${report} ERROR_FILE ${report})
if(NOT status EQUAL 0)
  file(READ ${report} text)
  message(FATAL_ERROR "${text}")
endif()
if(cache)
  file(MAKE_DIRECTORY ${earlier})
  foreach(file ${files})
    file(COPY ${folder}/${file} DESTINATION ${earlier})
  endforeach()
  file(TOUCH ${earlier}/complete)
endif()
