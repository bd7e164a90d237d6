module plimsoll/experiments

go 1.26.0

require (
	golang.org/x/sys v0.49.0
	pgregory.net/rapid v1.3.0
	plimsoll v0.0.0
)

require (
	golang.org/x/tools v0.52.0 // indirect
	k8s.io/utils v0.0.0-20260707023825-cf1189d6abe3 // indirect
)

replace plimsoll => ../
