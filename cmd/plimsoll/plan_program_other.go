//go:build !linux

package main

import (
	"time"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/report"
)

const planPatience = 10 * time.Minute

func planProgram(*cobra.Command, planOptions, []string) (*report.PlanDocument, error) {
	return nil, fault.Inputf("a program plans itself on Linux alone").
		WithHint("give its configuration files and flags instead, or plan it on a Linux host: no GPU is needed")
}
