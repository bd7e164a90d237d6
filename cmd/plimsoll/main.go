// Command plimsoll plans the memory of offloaded optimizer state and holds that state on the host.
package main

import "os"

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }
