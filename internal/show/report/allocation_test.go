//go:build linux

package report

import "testing"

// TestSlowAllocationIsTheHosts: a start is explained where the host was slow to give memory, and only there.
func TestSlowAllocationIsTheHosts(t *testing.T) {
	const want = "the host gave memory at 0.7 GB/s, as virtual machines do on first use"
	if got := slowAllocation(0.7e9); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := slowAllocation(2.5e9); got != "" {
		t.Errorf("memory at 2.5 GB/s is slow: %q", got)
	}
}
