//go:build !linux

package main

import (
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

const planPatience = 10 * time.Minute

func planProgram(*cobra.Command, planOptions) (*report.PlanDocument, error) {
	return nil, errLinuxAlone
}
func planVaried(*cobra.Command, planOptions) (*report.Varied, error) { return nil, errLinuxAlone }

var errLinuxAlone = fault.Inputf("a program plans itself on Linux alone").
	WithHint("give its configuration files and flags instead, or plan it on a Linux host: no GPU is needed")
