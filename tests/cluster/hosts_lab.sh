#!/bin/bash
# First process of a lab's switch or of one of its hosts; hosts_lab.py starts it in new namespaces.
#   hosts_lab.sh switch ADDRESS/PREFIX
#   hosts_lab.sh host NAME PATH VISIBLE...
# PATH: of login shells. VISIBLE: folders of the real machine that stay in sight although they lie
# below one that a host has of its own.
# Prints its process id, as the real machine counts, when it is ready.
set -eu
role=$1
shift
# The real machine's /proc is still mounted; read by the shell itself, "self" is this shell.
read -r pid _ </proc/self/stat

switch() {
  mount -t tmpfs -o mode=755,size=64m own /run
  mkdir -m 700 /run/shared # What all hosts of the lab see, and nobody else.
  ssh-keygen -q -t ed25519 -N "" -f /run/shared/key
  # Hosts' default route ends here: what they send elsewhere is refused at once, as by a firewall.
  # Through a /proc of its own: a container's may be read-only, and the real one is still read here.
  mkdir /run/proc
  mount -t proc proc /run/proc
  echo 1 >/run/proc/sys/net/ipv4/ip_forward
  umount /run/proc
  ip route add prohibit default
  ip link add bridge type bridge
  ip address add "$1" dev bridge
  ip link set bridge up
}

own_folder() { # FOLDER MODE SIZE VISIBLE...: an empty one, but for what has to stay visible in it
  local folder=$1 stage=/run/stage visible
  mkdir "$stage"
  mount -t tmpfs -o "mode=$2,size=$3" own "$stage"
  for visible in "${@:4}"; do
    [[ $visible == "$folder"/* ]] || continue
    mkdir -p "$stage${visible#"$folder"}"
    mount --bind "$visible" "$stage${visible#"$folder"}"
  done
  mount --move "$stage" "$folder"
  rmdir "$stage"
}

own_file() { # FILE TEXT; nothing to do where there is no such file
  local at
  at=$(readlink -m "$1")
  [ -e "$at" ] || return 0
  printf '%s' "$2" >"/run/$(basename "$1")"
  mount --bind "/run/$(basename "$1")" "$at"
}

host() {
  local name=$1 path=$2
  shift 2
  mount -t proc proc /proc
  echo "$name" >/proc/sys/kernel/hostname
  exec 3</run/shared # It is the switch's until /run is this host's.
  mount -t tmpfs -o mode=755,size=64m own /run
  mkdir /run/shared
  # As it is: mount would follow the link to the folder that covers the switch's.
  mount --no-canonicalize --bind /proc/self/fd/3 /run/shared
  exec 3<&-
  own_folder /tmp 1777 4g "$@"
  own_folder /root 700 1g "$@"
  own_folder /dev/shm 1777 2g
  # As Debian writes it: the host's own name leads to its loopback, other hosts' names nowhere.
  own_file /etc/hosts $'127.0.0.1 localhost\n127.0.1.1 '"$name"$'\n'
  own_file /etc/resolv.conf ""
  # Without a password, but not locked: sshd without PAM refuses keys of a locked account.
  own_file /etc/shadow $'root:*:19000:0:99999:7:::\n'
  ip link set lo up
  mkdir -m 700 /root/.ssh
  cp /run/shared/key.pub /root/.ssh/authorized_keys
  install -m 600 /run/shared/key /root/.ssh/id_ed25519
  echo "export PATH=$path" >/root/.bashrc
  ssh-keygen -q -t ed25519 -N "" -f /run/host_key
  mkdir -m 755 /run/sshd
  /usr/sbin/sshd -f /dev/null -h /run/host_key -E /run/sshd.log -o PidFile=/run/sshd.pid \
    -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password
}

"$role" "$@"
echo "$pid"
exec >&- # Who reads our output must not wait for us.
while :; do
  sleep 3600 &
  wait $!
done
