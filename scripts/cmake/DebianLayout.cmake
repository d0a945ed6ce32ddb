# Run by cpack over what it is about to pack: where Debian has it and its programs look for it.
set(share "${CPACK_TEMPORARY_DIRECTORY}/usr/share")
file(MAKE_DIRECTORY "${share}/zsh/vendor-completions")
file(RENAME "${share}/zsh/site-functions/_gradclip" "${share}/zsh/vendor-completions/_gradclip")
file(REMOVE_RECURSE "${share}/zsh/site-functions")
execute_process(COMMAND gzip -9n "${share}/man/man1/gradclip.1" COMMAND_ERROR_IS_FATAL ANY)
