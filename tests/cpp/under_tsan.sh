#!/bin/sh
# Runs a program that is built with -fsanitize=thread. The runtime of GCC 12 and 13 fails at the start if the kernel
# randomises addresses in more bits than the runtime supports. In this case the program runs without randomisation.
export TSAN_OPTIONS="suppressions=$(dirname "$0")/tsan.supp"
output=$("$@" 2>&1)
status=$?
case $output in
*"unexpected memory mapping"*) exec setarch "$(uname -m)" -R "$@" ;;
esac
printf '%s\n' "$output"
exit $status
