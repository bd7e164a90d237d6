//go:build linux

package probe

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"time"

	"plimsoll/internal/base/samples"
)

// Root is a process that a job is known to have. Its descendants belong to the job, too.
type Root struct {
	// Identity is the process. A StartTime of 0 stands for the process that has the PID when it is first sampled.
	Identity
	Rank int
	Role samples.Role
}

// member is a process of the job.
type member struct {
	Identity
	rank int
	role samples.Role
	memory
}

// adopt takes in the roots that are new, and forgets those that the caller does not name any more.
func (s *Sampler) adopt(roots []Root) {
	for _, root := range roots {
		known, ok := s.roots[root.PID]
		if ok && (root.StartTime == 0 || root.StartTime == known.StartTime) {
			if m := s.members[known.Identity]; m != nil {
				m.rank, m.role = root.Rank, root.Role
			}
			continue
		}
		found, err := s.stat(root.PID)
		switch {
		case err == nil && root.StartTime != 0 && root.StartTime != found.StartTime: // it has ended
		case err == nil:
			root.Identity = found.Identity
			s.roots[root.PID] = root
			s.members[root.Identity] = &member{Identity: root.Identity, rank: root.Rank, role: root.Role}
			s.pass.last, s.groupsRead = time.Time{}, time.Time{} // look for its children and its cgroups at once
		case !hasGone(err):
			s.miss("%v", err)
		}
	}
	named := map[int]bool{}
	for _, root := range roots {
		named[root.PID] = true
	}
	maps.DeleteFunc(s.roots, func(pid int, _ Root) bool { return !named[pid] })
}

// discover looks for new descendants of the members in one pass over /proc. A member keeps its rank when its parent
// has ended and another process has adopted it.
func (s *Sampler) discover() {
	entries, err := fs.ReadDir(s.root, "proc")
	if err != nil {
		s.miss("the processes of the job: %v", err)
		return
	}
	children, alive := map[int][]stat{}, map[Identity]bool{}
	for _, entry := range entries {
		pid, err := strconv.ParseUint(entry.Name(), 10, 31)
		if err != nil {
			continue
		}
		found, err := s.stat(int(pid))
		if err == nil && !found.hasEnded() {
			children[found.parent] = append(children[found.parent], found)
			alive[found.Identity] = true
		} else if err != nil && !hasGone(err) {
			s.miss("%v", err)
		}
	}
	queue := slices.SortedFunc(maps.Values(s.members), func(a, b *member) int { return a.PID - b.PID })
	for len(queue) > 0 {
		parent := queue[0]
		queue = queue[1:]
		if !alive[parent.Identity] {
			continue // another process may have its PID by now
		}
		for _, child := range children[parent.PID] {
			if s.members[child.Identity] == nil {
				m := &member{Identity: child.Identity, rank: parent.rank, role: samples.Child}
				s.members[m.Identity] = m
				queue = append(queue, m)
			}
		}
	}
}

// miss notes what could not be read.
func (s *Sampler) miss(format string, arguments ...any) {
	text := fmt.Sprintf(format, arguments...)
	if !slices.Contains(s.missed, text) {
		s.missed = append(s.missed, text)
	}
}
