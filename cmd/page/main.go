// Command page writes the planner for a browser: MODULE.wasm WASM_EXEC.js VERSION PAGE.html.
package main

import (
	"errors"
	"fmt"
	"os"

	"plimsoll/internal/show/page"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: page MODULE.wasm WASM_EXEC.js VERSION PAGE.html")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

func write(module, support, version, name string) error {
	program, err := os.ReadFile(module)
	if err != nil {
		return err
	}
	script, err := os.ReadFile(support)
	if err != nil {
		return err
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	err = page.Write(file, page.Program{Module: program, Support: string(script), Version: version})
	return errors.Join(err, file.Close())
}
