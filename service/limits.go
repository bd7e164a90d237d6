package service

import "golang.org/x/sys/unix"

// portion is how many connections of a kind this process takes at a time: an eighth
// of the files that it may open, and no more than most. The sessions have the rest.
func portion(most int) int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return most
	}
	return max(2, min(most, int(min(limit.Cur, 1<<20)/8)))
}

// mostIdle is how many clients without a session may be idle at a time.
const mostIdle = 256

// hangUpOnIdle ends the connection that was idle for the longest, where more than so
// many are: each takes a file, which sessions need.
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
	longest.idleSince.Store(0) // it is counted no more
	_ = longest.c.Close()
	return true
}
