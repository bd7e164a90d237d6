// Command init is the first process of an emulated machine. It runs the shell script
// /tests/setup, if there is one, and every /tests/*.test with the arguments and the environment that the files
// /tests/arguments and /tests/environment list, one a line, says how they ended,
// and turns the machine off. At most two tests that fail run once more, as an emulated core may stand still for long
// in any place. The second run decides, and the log names the tests that failed in the first.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
		if err := runTests(test); err != nil {
			fmt.Println("guest:", test, err)
			verdict = "FAIL"
		}
	}
	fmt.Println("guest: all tests", verdict)
	// Until the serial line has sent everything, or the last lines are lost.
	_ = unix.IoctlSetInt(1, unix.TCSBRK, 1)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// runTests runs a program of tests, and then those that failed once more.
func runTests(program string) error {
	var log bytes.Buffer
	command := guestCommand(program, lines("/tests/arguments")...)
	command.Stdout = io.MultiWriter(os.Stdout, &log)
	err := command.Run()
	var failed []string
	for _, match := range failure.FindAllStringSubmatch(log.String(), -1) {
		failed = append(failed, match[1])
	}
	if err == nil || len(failed) == 0 || len(failed) > mostAgain {
		return err
	}
	fmt.Println("guest: once more, after a failure:", strings.Join(failed, " "))
	return run(program, "-test.v", "-test.timeout=0", "-test.run=^("+strings.Join(failed, "|")+")$")
}

// failure is the line of a test of the highest level that failed.
var failure = regexp.MustCompile(`(?m)^--- FAIL: (\w+)`)

// mostAgain is how many tests may fail, so that the reason may be the emulator.
const mostAgain = 2

func run(program string, arguments ...string) error { return guestCommand(program, arguments...).Run() }

func guestCommand(program string, arguments ...string) *exec.Cmd {
	command := exec.Command(program, arguments...)
	command.Dir, command.Stdout, command.Stderr = "/tests", os.Stdout, os.Stderr
	command.Env = append([]string{"HOME=/tmp", "TMPDIR=/tmp", "PATH=/bin"}, lines("/tests/environment")...)
	return command
}

func lines(name string) []string {
	text, err := os.ReadFile(name)
	if err != nil {
		fmt.Println("guest:", err)
	}
	return strings.Fields(string(text))
}
