package launch

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A single rank has the terminal to itself: its process group is the one that
// the terminal talks to, as a shell does it with what it starts. The shell knows
// of the guard's group alone, so the rank has the terminal only while that is to
// have it, and when the rank is stopped (Ctrl-Z) so is the guard's group.

// terminalGroup is the process group that a terminal talks to; 0 where the file
// is not the terminal of this process.
func terminalGroup(terminal *os.File) int {
	group, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return group
}

func setTerminal(terminal *os.File, group int) {
	signal.Ignore(syscall.SIGTTOU) // or the kernel stops this process for asking
	_ = unix.IoctlSetPointerInt(int(terminal.Fd()), unix.TIOCSPGRP, group)
	signal.Reset(syscall.SIGTTOU)
}

// reclaimTerminal takes the terminal back for the group of this process, the
// guard, from a group of which nothing is left: a keeper that was killed could
// not return it.
func reclaimTerminal(terminal *os.File) {
	if group := terminalGroup(terminal); group > 0 && syscall.Kill(-group, 0) == syscall.ESRCH {
		setTerminal(terminal, unix.Getpgrp())
	}
}

// guardGroup is the process group of the guard, to the keeper.
func guardGroup() int {
	group, err := unix.Getpgid(os.Getppid())
	if err != nil {
		return 0
	}
	return group
}

// mayHaveTerminal says whether a rank of this job may have the terminal now.
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

// stopped is the signal that has stopped a rank since this was last asked; 0 for
// none.
func (p *process) stopped() syscall.Signal {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, p.command.Process.Pid, &info, unix.WSTOPPED|unix.WNOHANG, nil)
	if err != nil || info.Signo == 0 {
		return 0
	}
	const status = 24 // where si_status is, of a signal SIGCHLD
	return syscall.Signal(*(*int32)(unsafe.Add(unsafe.Pointer(&info), status)))
}

// suspend stops the guard's group where the terminal has stopped the rank: the
// shell takes the terminal then, and can have both go on. Where no shell waits
// for the group the kernel would not have stopped it, and the rank goes on.
func (j *Job) suspend(p *process) {
	switch s, group := p.stopped(), guardGroup(); {
	case s == syscall.SIGTSTP && isOrphaned(group):
		p.signalGroup(syscall.SIGCONT)
	case s == syscall.SIGTSTP, s == syscall.SIGTTIN, s == syscall.SIGTTOU:
		_ = syscall.Kill(-group, syscall.SIGTSTP)
	}
}

// resume has the rank go on after the guard's group, in the foreground if that is.
func (j *Job) resume(p *process) {
	if j.mayHaveTerminal() {
		setTerminal(j.Stdin, p.command.Process.Pid)
	}
	p.signalGroup(syscall.SIGCONT)
}

// isOrphaned says whether a process group has no parent in its session that
// could have it go on.
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
