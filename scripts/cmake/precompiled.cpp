// Has nothing: its target holds the precompiled headers of GradclipRoom.cmake or GradclipTest.cmake.
