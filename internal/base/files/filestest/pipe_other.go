//go:build !linux

package filestest

import "errors"

func mkfifo(string) error { return errors.ErrUnsupported }
