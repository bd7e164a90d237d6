//go:build linux

// Package probe measures the memory that processes really use, from /proc, and samples a whole job: its processes,
// its cgroups, the host and the GPUs. It touches none of them.
package probe
