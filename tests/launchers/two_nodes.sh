#!/bin/bash
# Two nodes and a controller of Slurm on one machine: the first process of namespaces of its own.
#
#   unshare --mount --propagation private --pid --fork --mount-proc --net --uts --ipc \
#       two_nodes.sh FOLDER
#
# All addresses, mounts and processes are in these namespaces, and the kernel ends them with this
# process. It prints "ready", and ends when its standard input is closed.
set -eu
folder=$1
source=$(dirname "$0")

# Files at fixed places: the key and the socket of munge, names of hosts, what Slurm asks of cgroups.
for place in /run /sys/fs/cgroup /dev/shm; do
    mount -t tmpfs tmpfs "$place"
done
mkdir -p /run/netns /run/munge
mount --bind "$source/hosts" /etc/hosts

hostname controller
ip link set lo up
ip link add bridge0 type bridge
ip address add 10.77.0.1/24 dev bridge0
ip link set bridge0 up
for number in 1 2; do
    node=node$number
    ip netns add $node
    ip link add $node type veth peer name eth0 netns $node
    ip link set $node master bridge0 up
    ip -n $node link set lo up
    ip -n $node address add 10.77.0.1$number/24 dev eth0
    ip -n $node link set eth0 up
    # `ip netns exec` would hide the cgroups. A shell waits there for commands in this node.
    nsenter --net=/run/netns/$node unshare --uts --mount \
        sh -c "hostname $node; echo \$\$ > /run/$node; exec sleep infinity" &
    until [ -s /run/$node ]; do sleep 0.05; done
done

mkdir "$folder/state"
touch /run/gpu{0,1,2,3} # stand in for the device files of four GPUs
sed "s|@FOLDER@|$folder|" "$source/slurm.conf" > "$folder/slurm.conf"
printf 'NodeName=node[1-2] Name=gpu File=/run/gpu[0-3]\n' > "$folder/gres.conf"
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n' > "$folder/cgroup.conf"
export SLURM_CONF="$folder/slurm.conf"

head -c 1024 /dev/urandom > /run/munge.key
chmod 400 /run/munge.key
munged --foreground --key-file=/run/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/munged.pid --seed-file=/run/munge.seed > "$folder/munged.log" 2>&1 &
until [ -S /run/munge/munge.socket.2 ]; do sleep 0.05; done
slurmctld -D -c < /dev/null > "$folder/slurmctld.log" 2>&1 &
for node in node1 node2; do
    nsenter --target "$(cat /run/$node)" --net --uts --mount slurmd -D < /dev/null \
        > "$folder/slurmd-$node.log" 2>&1 &
done
until [ "$(sinfo --noheader --format=%T 2> /dev/null)" = idle ]; do sleep 0.2; done
echo ready
cat > /dev/null
