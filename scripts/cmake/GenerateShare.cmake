# cmake -DPROGRAM=gradclip -DSHARE=folder -P GenerateShare.cmake: what the program says of its own options, as files.
file(MAKE_DIRECTORY "${SHARE}")
function(generate file)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=RANK "${PROGRAM}" ${ARGN}
    OUTPUT_FILE "${SHARE}/${file}" RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    file(REMOVE "${SHARE}/${file}")
    message(FATAL_ERROR "gradclip ${ARGN} exits with ${code}")
  endif()
endfunction()
foreach(shell IN ITEMS bash zsh fish)
  generate("gradclip.${shell}" --print-completion ${shell})
endforeach()
generate(gradclip.1 --print-man)
