//go:build linux

package probe

import (
	"io/fs"
	"os"
	"strconv"
)

// Running is a process that has not ended.
type Running struct {
	Identity
	Parent int
	Name   string // /proc/PID/comm
}

// Processes returns the processes of this host that have not ended.
func Processes() ([]Running, error) {
	s := Sampler{root: os.DirFS("/")}
	entries, err := fs.ReadDir(s.root, "proc")
	if err != nil {
		return nil, err
	}
	var all []Running
	for _, entry := range entries {
		pid, err := strconv.ParseUint(entry.Name(), 10, 31)
		if err != nil {
			continue
		}
		if found, err := s.stat(int(pid)); err == nil && !found.hasEnded() {
			all = append(all, Running{found.Identity, found.parent, found.name})
		}
	}
	return all, nil
}

// IsRunning reports whether a process has not ended.
func (id Identity) IsRunning() bool {
	s := Sampler{root: os.DirFS("/")}
	found, err := s.stat(id.PID)
	return err == nil && !found.hasEnded() && found.StartTime == id.StartTime
}
