//go:build linux

package launch

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A single rank has the terminal to itself: its process group is the foreground group,
// as if a shell had started it. The shell knows only the guard's group. So the rank has
// the terminal only while the guard's group may have it. When the rank is stopped
// (Ctrl-Z), the guard's group is stopped, too.

// terminalGroup returns the foreground process group of a terminal. It returns 0 if the
// file is not the terminal of this process.
func terminalGroup(terminal *os.File) int {
	group, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return group
}

func setTerminal(terminal *os.File, group int) {
	signal.Ignore(syscall.SIGTTOU) // else the kernel stops this process
	_ = unix.IoctlSetPointerInt(int(terminal.Fd()), unix.TIOCSPGRP, group)
	signal.Reset(syscall.SIGTTOU)
}

// reclaimTerminal makes the group of this process, the guard, the foreground group
// again, if no process of that group is left. A keeper that was killed could not do so.
func reclaimTerminal(terminal *os.File) {
	if group := terminalGroup(terminal); group > 0 && syscall.Kill(-group, 0) == syscall.ESRCH {
		setTerminal(terminal, unix.Getpgrp())
	}
}

// guardGroup returns the process group of the guard, for the keeper.
func guardGroup() int {
	group, err := unix.Getpgid(os.Getppid())
	if err != nil {
		return 0
	}
	return group
}

// mayHaveTerminal reports whether a rank of this job may have the terminal now.
func (j *Job) mayHaveTerminal() bool {
	group := terminalGroup(j.Stdin)
	return group > 0 && group == guardGroup()
}

// returnTerminal gives the terminal back to the guard, if a rank has it.
func (j *Job) returnTerminal(p *process) {
	if terminalGroup(j.Stdin) == p.command.Process.Pid {
		setTerminal(j.Stdin, guardGroup())
	}
}

// stopped returns the signal that stopped a rank since the last call, or 0.
func (p *process) stopped() syscall.Signal {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, p.command.Process.Pid, &info, unix.WSTOPPED|unix.WNOHANG, nil)
	if err != nil || info.Signo == 0 {
		return 0
	}
	const status = 24 // offset of si_status for SIGCHLD
	return syscall.Signal(*(*int32)(unsafe.Add(unsafe.Pointer(&info), status)))
}

// suspend stops the guard's group if the terminal has stopped the rank. The shell then
// takes the terminal, and can resume both. If no shell waits for the group, the kernel
// would not have stopped it, and the rank goes on.
func (j *Job) suspend(p *process) {
	switch s, group := p.stopped(), guardGroup(); {
	case s == syscall.SIGTSTP && isOrphaned(group):
		p.signalGroup(syscall.SIGCONT)
	case s == syscall.SIGTSTP, s == syscall.SIGTTIN, s == syscall.SIGTTOU:
		_ = syscall.Kill(-group, syscall.SIGTSTP)
	}
}

// resume continues the rank after the guard's group, in the foreground if the guard's
// group is there.
func (j *Job) resume(p *process) {
	if j.mayHaveTerminal() {
		setTerminal(j.Stdin, p.command.Process.Pid)
	}
	p.signalGroup(syscall.SIGCONT)
}

// isOrphaned reports whether a process group has no parent in its session that could
// resume it.
func isOrphaned(group int) bool {
	return !slices.ContainsFunc(processes(groupField, group), func(pid int) bool {
		own, err := unix.Getsid(pid)
		if err != nil {
			return false
		}
		parent := statOf(pid, parentField)
		above, err := unix.Getsid(parent)
		return err == nil && parent > 0 && above == own && statOf(parent, groupField) != group
	})
}
