//go:build linux

package service

import "golang.org/x/sys/unix"

// portion returns how many connections of a kind this process accepts at a time: an
// eighth of its limit on open files, but at most most. The rest of the files is for
// sessions.
func portion(most int) int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return most
	}
	return max(2, min(most, int(min(limit.Cur, 1<<20)/8)))
}

// mostIdle is how many clients without a session may be idle at a time.
const mostIdle = 256

// hangUpOnIdle closes the connection that has been idle for the longest, if more than most are idle. Each takes a
// file, and sessions need files.
func (s *Server) hangUpOnIdle(most int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	idle := 0
	var longest *connection
	for c := range s.open {
		since := c.idleSince.Load()
		if since == 0 {
			continue
		}
		idle++
		if longest == nil || since < longest.idleSince.Load() {
			longest = c
		}
	}
	if idle <= most {
		return false
	}
	longest.idleSince.Store(0) // no longer counted
	_ = longest.c.Close()
	return true
}
