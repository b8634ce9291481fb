#!/bin/sh
# A stand-in for a fast drive: a file system on a loop device over a file in memory, for benchmarks/storage.py.
#
#   benchmarks/fastdisk.sh up   [directory] [size]    make it, mount it, print the mount point
#   benchmarks/fastdisk.sh down [directory]           remove all of that again
#
# The defaults are /tmp/fastdisk and 4G. The memory is taken at once, so no write waits for pages of the backing file.
# The file system is XFS if mkfs.xfs is installed, else ext4. This needs root, loop devices and room in /dev/shm. Figures
# depend on these choices, so stderr says what was made. stdout has only the mount point.
set -eu

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "fastdisk: $*" >&2; exit 1; }
say() { echo "fastdisk: $*" >&2; }

[ $# -ge 1 ] && [ $# -le 3 ] || usage
directory=${2:-/tmp/fastdisk}
size=${3:-4G}
backing=${FASTDISK_BACKING:-/dev/shm}
image=$backing/fastdisk$(printf %s "$directory" | tr -c 'A-Za-z0-9' _).img

remove() {
    if mountpoint -q "$directory" 2>/dev/null; then
        umount "$directory" || fail "$directory is in use: end what has files open there, then try again"
    fi
    for device in $(losetup --noheadings --output NAME --associated "$image" 2>/dev/null); do
        losetup --detach "$device"
    done
    rm -f "$image"
    if [ -d "$directory" ]; then rmdir "$directory" 2>/dev/null || say "$directory is not empty: left as it is"; fi
}

attach() {
    # With direct I/O the page cache does not hold the data twice. Not every backing file system supports it.
    if device=$(losetup --find --show --direct-io=on "$image" 2>/dev/null); then
        say "$device over $image, direct I/O"
    elif device=$(losetup --find --show "$image"); then
        say "$device over $image, buffered: $backing refuses direct I/O"
    else
        fail "no loop device for $image: is this a container without /dev/loop-control?"
    fi
}

make_file_system() {
    # Discard is off. It would free pages of the backing file, and later writes would wait for new ones.
    if command -v mkfs.xfs >/dev/null; then
        mkfs.xfs -q -K "$device" && kind=xfs
    elif command -v mkfs.ext4 >/dev/null; then
        mkfs.ext4 -q -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 -m 0 "$device" && kind=ext4
    else
        fail "neither mkfs.xfs nor mkfs.ext4 is installed"
    fi
    mount -t "$kind" "$device" "$directory"
    say "$kind on $directory, $size"
}

case $1 in
up)
    [ "$(id -u)" = 0 ] || fail "loop devices and mount need root"
    [ ! -e "$image" ] || fail "$image exists: 'fastdisk.sh down $directory' first"
    ! mountpoint -q "$directory" 2>/dev/null || fail "$directory is a mount point already"
    trap '[ $? = 0 ] || remove' EXIT
    mkdir -p "$directory"
    fallocate --length "$size" "$image" || fail "no room for $size in $backing: $(df -h --output=avail "$backing" | tail -1) left"
    attach
    make_file_system
    echo "$directory"
    ;;
down)
    remove
    ;;
*)
    usage
    ;;
esac
