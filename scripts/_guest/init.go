// Command init is the first process of an emulated machine. It runs the shell script
// /tests/setup, if there is one, and every /tests/*.test with the arguments and the environment that the files
// /tests/arguments and /tests/environment list, one a line, says how they ended,
// and turns the machine off.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

func main() {
	for _, m := range []struct{ kind, target string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := unix.Mount(m.kind, m.target, m.kind, 0, ""); err != nil {
			fmt.Println("guest: mounting", m.target, err)
		}
	}
	verdict := "ok"
	if _, err := os.Stat("/tests/setup"); err == nil {
		if err := run("/bin/sh", "/tests/setup"); err != nil {
			fmt.Println("guest: /tests/setup:", err)
		}
	}
	tests, err := filepath.Glob("/tests/*.test")
	if err != nil || len(tests) == 0 {
		verdict = "FAIL"
	}
	for _, test := range tests {
		if err := run(test, lines("/tests/arguments")...); err != nil {
			fmt.Println("guest:", test, err)
			verdict = "FAIL"
		}
	}
	fmt.Println("guest: all tests", verdict)
	// Until the serial line has sent everything, or the last lines are lost.
	_ = unix.IoctlSetInt(1, unix.TCSBRK, 1)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run(program string, arguments ...string) error {
	command := exec.Command(program, arguments...)
	command.Dir, command.Stdout, command.Stderr = "/tests", os.Stdout, os.Stderr
	command.Env = append([]string{"HOME=/tmp", "TMPDIR=/tmp", "PATH=/bin"}, lines("/tests/environment")...)
	return command.Run()
}

func lines(name string) []string {
	text, err := os.ReadFile(name)
	if err != nil {
		fmt.Println("guest:", err)
	}
	return strings.Fields(string(text))
}
